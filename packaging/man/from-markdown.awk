# Makes a manual page of section 5 from documents: headings, paragraphs, lists, tables and code, as
# docs/ has them. A row of a table becomes a tagged paragraph.
#
#   awk -v version=0.1.0 -v name='one line' -f from-markdown.awk FILE.md...

BEGIN {
  print ".\\\" Made from documents in docs/. SPDX-License-Identifier: MIT OR Apache-2.0"
  printf ".TH UDM 5 \"\" \"udm %s\" \"udm\"\n.SH NAME\nudm \\- %s\n", version, name
}

# roff's own characters.
function escaped(text) {
  gsub(/\\/, "\\e", text)
  gsub(/-/, "\\-", text)
  gsub(/~/, "\\(ti", text)
  gsub(/\^/, "\\(ha", text)
  gsub(/'/, "\\(aq", text)
  return text
}

# Text without links and emphasis of Markdown; words in backquotes and bold words are bold.
function inline(text,    pieces, count, i, out) {
  while (match(text, /\[[^]]*\]\([^)]*\)/)) {
    out = substr(text, RSTART + 1, RLENGTH - 1)
    sub(/\].*/, "", out)
    text = substr(text, 1, RSTART - 1) out substr(text, RSTART + RLENGTH)
  }
  out = ""
  count = split(text, pieces, "`")
  for (i = 1; i <= count; i++) {
    if (i % 2 == 0) {
      out = out "\\fB" escaped(pieces[i]) "\\fR"
    } else {
      out = out emphasis(escaped(pieces[i]))
    }
  }
  if (out ~ /^[.]/) out = "\\&" out
  return out
}

function emphasis(text,    pieces, count, i, out) {
  count = split(text, pieces, /\*\*/)
  out = pieces[1]
  for (i = 2; i <= count; i++) out = out (is_bold ? "\\fR" : "\\fB") pieces[i] toggled()
  count = split(out, pieces, /\*/)
  out = pieces[1]
  for (i = 2; i <= count; i++) out = out (i % 2 == 0 ? "\\fI" : "\\fR") pieces[i]
  return out
}

# Bold text may begin on one line and end on another one.
function toggled() { is_bold = !is_bold; return "" }

function end_code() {
  if (is_code) print ".EE\n.RE"
  is_code = 0
}

function begin_code() {
  if (!is_code) print (is_first ? "" : ".PP\n") ".RS 4\n.EX"
  is_first = 0
  is_code = 1
}

function cells_of(line,    i) {
  gsub(/\\\|/, "\001", line)
  sub(/^\| */, "", line)
  sub(/ *\| *$/, "", line)
  count = split(line, cells, / *\| */)
  for (i = 1; i <= count; i++) gsub(/\001/, "|", cells[i])
}

function row(    i, tag) {
  is_bold = 0
  tag = inline(cells[1])
  print ".TP"
  if (count == 3) tag = tag " (" heading[2] ": " inline(cells[2]) ")"
  print tag
  if (count == 3) {
    print inline(cells[3])
  } else {
    for (i = 2; i <= count; i++) print (count > 2 ? heading[i] ": " : "") inline(cells[i])
  }
}

FNR == 1 { is_bold = 0 }
/^```/ { if (is_fenced) { end_code() } else { begin_code() } is_fenced = !is_fenced; next }
is_fenced || /^    / {
  if (!is_fenced && in_list) { sub(/^ */, ""); print inline($0); next }
  begin_code()
  if (!is_fenced) sub(/^    /, "")
  line = escaped($0)
  if (line ~ /^[.]/) line = "\\&" line
  print line
  next
}
is_code { end_code() }
/^#+ / { is_first = 1 }
/^# / { in_list = 0; print ".SH " toupper(inline(substr($0, 3))); next }
/^##+ / { in_list = 0; sub(/^#+ /, ""); print ".SS " inline($0); next }
/^\|[-|]+\|$/ { next }
/^\|/ {
  cells_of($0)
  if (!in_table) {
    for (i = 1; i <= count; i++) heading[i] = inline(cells[i])
    in_table = 1
  } else {
    row()
  }
  next
}
{ in_table = 0 }
/^\* / { in_list = 1; is_bold = 0; print ".IP \\(bu 2"; print inline(substr($0, 3)); next }
/^$/ { in_list = 0; is_paragraph = 0; is_bold = 0; next }
in_list { sub(/^ */, ""); print inline($0); next }
{
  if (!is_paragraph && !is_first) print ".PP"
  is_first = 0
  is_paragraph = 1
  print inline($0)
}

END {
  end_code()
  print ".SH \"SEE ALSO\"\n.BR udm (1),\n.BR udm (7),\n.BR udm\\-check\\-config (1),\n.BR udm\\-save (1)"
}
