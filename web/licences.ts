import { existsSync, readFileSync, readdirSync } from "node:fs";
import { dirname, join } from "node:path";
import type { Plugin } from "vite";

/** Writes LICENSES.txt: name, version and licence of each package of which code is in the page. */
export function licences(): Plugin {
  const packages = new Set<string>();
  return {
    name: "licences",
    generateBundle(_, bundle) {
      for (const chunk of Object.values(bundle)) {
        const modules = chunk.type === "chunk" ? Object.keys(chunk.modules) : [];
        for (const id of [...modules, ...this.getModuleIds()]) {
          const folder = packageFolder(id);
          if (folder) packages.add(folder);
        }
      }
      const source = [...packages].sort().map(licence).join("\n\n");
      this.emitFile({ type: "asset", fileName: "LICENSES.txt", source });
    },
  };
}

/** Returns the folder of the package that a module is of; nothing for one of the page's own. */
function packageFolder(id: string): string | undefined {
  let folder = dirname(id.replace(/^\0/, "").replace(/\?.*$/, ""));
  if (!folder.includes("/node_modules/")) return undefined;
  while (!existsSync(join(folder, "package.json")) || !described(folder).version) folder = dirname(folder);
  return folder;
}

function described(folder: string): { name: string; version: string; license: string } {
  return JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
}

function licence(folder: string): string {
  const { name, version, license } = described(folder);
  const file = readdirSync(folder).find((entry) => /^licen[cs]e/i.test(entry));
  if (!file) throw new Error(`${name} has no licence file`);
  return `${name} ${version}, ${license}\n\n${readFileSync(join(folder, file), "utf8").trim()}\n`;
}
