#!/bin/bash
# Opens a report of `udm bench` in headless Chromium: it must load without an error, ask nobody for
# anything, and show every plot.
#
#   scripts/check-report.sh [REPORT [PICTURE.png]]
#
# A copy of the report gets a script that measures what the browser made of it; the report itself
# has none.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
report=${1:-$root/report/index.html}
picture=${2:-}
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) || {
  echo "no Chromium; scripts/install-tools.sh report installs it" >&2
  exit 1
}
work=$(mktemp -d "${TMPDIR:-/tmp}/udm-report.XXXXXX")
trap 'rm -rf "$work"' EXIT

probe='<script>
window.addEventListener("load", () => {
  const shown = node => { const b = node.getBoundingClientRect(); return b.width > 0.4 && b.height > 0.4; };
  const say = [];
  const plots = [...document.querySelectorAll("svg.plot")];
  for (const plot of plots) {
    const name = plot.getAttribute("aria-label");
    const box = plot.getBoundingClientRect();
    const series = [...plot.querySelectorAll(".series")];
    if (box.width < 300 || box.height < 150) say.push("BAD: too small: " + name);
    if (series.length === 0) say.push("BAD: empty: " + name);
    for (const one of series) {
      const b = one.getBoundingClientRect();
      if (!(b.width > 0 || b.height > 0)) say.push("BAD: a series is not seen: " + name);
      if (b.left < box.left - 1 || b.right > box.right + 1 || b.top < box.top - 1 ||
          b.bottom > box.bottom + 1) say.push("BAD: a series leaves its plot: " + name);
    }
    for (const text of plot.querySelectorAll("text")) {
      const b = text.getBoundingClientRect();
      if (text.textContent && (!shown(text) || b.left < box.left - 1 || b.right > box.right + 1))
        say.push("BAD: cut off or not seen: " + text.textContent + " in " + name);
    }
  }
  for (const flame of document.querySelectorAll("svg.flame, svg.ladder")) {
    const name = flame.getAttribute("aria-label");
    const box = flame.getBoundingClientRect();
    const parts = [...flame.querySelectorAll(".frame, .rung")];
    if (box.width < 300 || !parts.some(shown)) say.push("BAD: nothing to see: " + name);
    for (const text of flame.querySelectorAll("text")) {
      const b = text.getBoundingClientRect();
      if (b.left < box.left - 1 || b.right > box.right + 1)
        say.push("BAD: cut off: " + text.textContent + " in " + name);
    }
  }
  const data = JSON.parse(document.getElementById("udm-bench").textContent);
  const wanted = data.reduce((sum, page) => sum + page.study.plots.length, 0);
  if (plots.length !== wanted) say.push("BAD: " + plots.length + " plots, not " + wanted);
  const flames = document.querySelectorAll("svg.flame").length;
  const asked = data.reduce((sum, page) => sum + (page.study.flames || []).length, 0);
  if (flames !== asked) say.push("BAD: " + flames + " flamegraphs, not " + asked);
  const loaded = performance.getEntriesByType("resource").filter(one => !one.name.startsWith("data:"));
  for (const one of loaded) say.push("BAD: loads " + one.name);
  say.push("PLOTS " + plots.length + " PAGES " + data.length);
  const out = document.createElement("pre");
  out.id = "probe";
  out.textContent = say.join("\n");
  document.body.appendChild(out);
});
</script>'
# Not by sed: the text is the report's to the letter, with the probe before the end of its body.
probe=$probe awk '{ if ($0 == "</body>") print ENVIRON["probe"]; print }' "$report" > "$work/probe.html"

run() {
  timeout 120 "$browser" --headless --no-sandbox --disable-gpu --disable-dev-shm-usage \
    --no-first-run --user-data-dir="$work/profile" --host-resolver-rules='MAP * ~NOTFOUND' \
    --enable-logging=stderr --v=0 "$@" 2> "$work/log"
}
run --virtual-time-budget=5000 --window-size=1200,2000 --dump-dom "file://$work/probe.html" > "$work/dom"
sed -n '/<pre id="probe">/,/<\/pre>/p' "$work/dom" | sed -e 's/.*<pre id="probe">//' -e 's/<\/pre>.*//' > "$work/said"
# What the page itself did wrong; the browser's own troubles with a bare machine are not ours.
if grep -E 'CONSOLE' "$work/log" >&2; then
  echo "the report makes the browser complain" >&2
  exit 1
fi
if grep BAD "$work/said" >&2; then exit 1; fi
grep -q '^PLOTS [1-9]' "$work/said" || { echo "the report was not shown; see:" >&2; tail -5 "$work/log" >&2; exit 1; }
[ -z "$picture" ] || run --window-size=1100,16000 --hide-scrollbars --screenshot="$(realpath -m "$picture")" \
  "file://$(realpath "$report")" > /dev/null
echo "$report: $(grep '^PLOTS' "$work/said" | tr 'A-Z' 'a-z'), each shown, nothing loaded"
