/* What all pages share: elements, the notice, the theme, and polling of their server. */
"use strict";
const shared = (() => {
  const THEMES = ["auto", "light", "dark"];
  const $ = (selector, root = document) => root.querySelector(selector);

  /** Create an element with children and attributes: `on…` adds a listener, `text` sets its text, `ns` is its
   * namespace. Text is never parsed as HTML.
   */
  function make(tag, { ns = "http://www.w3.org/1999/xhtml", ...attributes } = {}, ...children) {
    const made = document.createElementNS(ns, tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      if (name === "text") made.textContent = value;
      else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  }

  const notice = (text) => {
    $("#notice").hidden = !text;
    $("#notice").textContent = text;
  };

  /** Read the JSON in an element; null if it is empty. */
  const contained = (selector) => JSON.parse($(selector).textContent.trim() || "null");

  /** Show each newer document of the server while the page is visible; `version` returns that of the shown one. */
  async function follow({ url, seconds }, version, show) {
    let since = null;
    for (;;) {
      if (!document.hidden) {
        try {
          const address = new URL(url, location.href);
          if (version()) address.searchParams.set("after", version());
          const answer = await fetch(address, { cache: "no-store" });
          if (answer.status === 200) await show(await answer.json());
          else if (answer.status !== 204) throw new Error(`${answer.status} ${answer.statusText}`);
          since = null;
          notice("");
        } catch (error) {
          since ||= Date.now();
          notice(`No connection since ${new Date(since).toLocaleTimeString()} (${error.message}); what is shown is of before.`);
        }
      }
      await new Promise((resume) => setTimeout(resume, 1000 * seconds));
    }
  }

  /** Return functions that apply the viewer's theme, or a forced one, and that take the next; the button does so too.
   *
   * `changed` is called after each change, and `chose` with the name of a theme that the viewer took.
   */
  function themes(changed = () => {}, chose = () => {}) {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    let theme = "auto";
    try { theme = localStorage.getItem("trainctl-theme") || "auto"; } catch { /* a page from disk may have no storage */ }
    function apply(forced) {
      document.documentElement.dataset.theme = forced || (theme === "auto" ? (dark.matches ? "dark" : "light") : theme);
      $("#theme").textContent = `Theme: ${theme}`;
      changed();
    }
    function next() {
      theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
      try { localStorage.setItem("trainctl-theme", theme); } catch { /* as above */ }
      apply();
      chose(theme);
    }
    $("#theme").addEventListener("click", next);
    dark.addEventListener("change", () => apply());
    return { apply, next };
  }

  return { $, make, notice, contained, follow, themes };
})();
