import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";
import { licences } from "./licences.ts";

export default defineConfig({
  base: "./",
  plugins: [svelte(), licences()],
  build: {
    outDir: "../src/fenka/_web",
    emptyOutDir: true,
    target: ["chrome123", "firefox121", "safari17.5"],
    // The page's policy allows no data: URLs and no inline scripts.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    // Sources of what is bundled are in the repository and in the lock file.
    sourcemap: false,
    reportCompressedSize: false,
  },
});
