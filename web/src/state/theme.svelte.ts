/** Light, dark, or as the system has it. */

export const THEMES = ["auto", "light", "dark"] as const;
type Theme = (typeof THEMES)[number];

const KEY = "fenka theme";

class Themes {
  chosen = $state<Theme>(THEMES.find((name) => name === localStorage.getItem(KEY)) ?? "auto");

  constructor() {
    this.#apply();
  }

  next(): void {
    this.chosen = THEMES[(THEMES.indexOf(this.chosen) + 1) % THEMES.length]!;
    localStorage.setItem(KEY, this.chosen);
    this.#apply();
  }

  #apply(): void {
    document.documentElement.dataset.theme = this.chosen;
  }
}

export const theme = new Themes();
