// The colors of the charts follow those of the page, which follow the viewer's preference until the button is used.
(function () {
  "use strict";
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const wantsDark = window.matchMedia("(prefers-color-scheme: dark)");
  const KEY = "dslaunch-report-theme";

  function kept() {
    try { return window.localStorage.getItem(KEY); } catch (error) { return null; }  // a file may have no storage
  }
  function keep(theme) {
    try { window.localStorage.setItem(KEY, theme); } catch (error) { return; }
  }
  function isDark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : wantsDark.matches;
  }
  function color(name) {
    return getComputedStyle(root).getPropertyValue(name).trim();
  }
  function models() {
    const found = new Set();
    for (const page of window.Bokeh ? Bokeh.documents : []) {
      for (const one of page.roots()) {
        for (const model of one.references()) found.add(model);
      }
    }
    return found;
  }
  function set(model, values) {
    for (const name of Object.keys(values)) {
      if (name in model.properties) model[name] = values[name];
    }
  }
  function paint(inks) {
    for (const model of models()) {
      const kind = model.type || "";
      if (kind.endsWith("Axis")) {
        set(model, { axis_label_text_color: inks.soft, major_label_text_color: inks.soft,
                     group_text_color: inks.soft, axis_line_color: inks.line,
                     major_tick_line_color: inks.line, separator_line_color: inks.line });
      } else if (kind === "Grid" && model.grid_line_color !== null) {
        model.grid_line_color = inks.grid;
      } else if (kind === "Legend") {
        model.label_text_color = inks.ink;
      }
    }
  }
  function inksNow() {
    return { ink: color("--ink"), soft: color("--soft"), line: color("--line"), grid: color("--grid") };
  }
  function refresh() {
    if (button) {
      button.textContent = isDark() ? "Light" : "Dark";
      button.setAttribute("aria-label", isDark() ? "Show in light colors" : "Show in dark colors");
    }
    paint(inksNow());
    root.dataset.painted = isDark() ? "dark" : "light";
  }

  const before = kept();
  if (before === "dark" || before === "light") root.dataset.theme = before;
  if (button) {
    button.addEventListener("click", function () {
      root.dataset.theme = isDark() ? "light" : "dark";
      keep(root.dataset.theme);
      refresh();
    });
  }
  wantsDark.addEventListener("change", refresh);
  window.addEventListener("beforeprint", function () {
    paint({ ink: "#1b1f24", soft: "#57606a", line: "#d0d7de", grid: "#e4e8ec" });
  });
  window.addEventListener("afterprint", refresh);

  // For those who test the page: how many numbers each chart has.
  window.dslaunchPoints = function () {
    const found = {};
    for (const place of document.querySelectorAll(".chart")) {
      const id = place.firstElementChild && place.firstElementChild.dataset.rootId;
      let most = 0;
      for (const page of Bokeh.documents) {
        const model = id ? page.get_model_by_id(id) : null;
        for (const one of model ? model.references() : []) {
          if (one.type === "ColumnDataSource") most = Math.max(most, one.get_length() || 0);
        }
      }
      found[place.dataset.key] = most;
    }
    return found;
  };

  function begin(tries) {
    const wanted = document.querySelectorAll(".chart").length;
    let there = 0;
    for (const page of window.Bokeh ? Bokeh.documents : []) there += page.roots().length;
    if (there >= wanted || tries <= 0) refresh();
    else window.setTimeout(function () { begin(tries - 1); }, 20);
  }
  if (document.readyState === "loading") {
    document.addEventListener("DOMContentLoaded", function () { begin(500); });
  } else {
    begin(500);
  }
})();
