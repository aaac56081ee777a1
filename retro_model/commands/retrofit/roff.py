"""Text of manual pages without a formatter: headings, paragraphs, and examples with their line breaks."""

from __future__ import annotations

import re
import shlex

#: Macros of fonts, whose arguments are the text. Macros of two letters alternate between two fonts without a space.
FONTS = ("B", "I", "SM", "SB", "BI", "BR", "IB", "IR", "RB", "RI")
BREAKS = ("PP", "P", "LP", "TP", "IP", "HP", "sp", "RS", "RE")
AS_IT_STANDS, FILLED = ("nf", "EX", "TS", "T&"), ("fi", "EE", "TE")
HEADS = ("TS", "T&")  # heads of a table; options and formats follow, up to a full stop
CELLS = re.compile(r"(?:^|(?<=\t))T[{}](?=\t|$)|^[_=]$")  # marks of cells that span lines; rules
CHARACTERS = {"aq": "'", "dq": '"', "em": "-", "en": "-", "bu": "*", "co": "(c)", "lq": '"', "rq": '"', "ti": "~"}
CHARACTERS |= {"ha": "^", "rs": "\\", "oq": "'", "cq": "'", "mi": "-", "->": "->", "<=": "<=", ">=": ">=", "..": "..."}
ESCAPE = re.compile(
    r"\\(?:f(?:\[[^]]*\]|\(..|.)|s[+-]?\d|\[(?P<named>[^]]*)\]|\((?P<pair>..)|\*(?:\[[^]]*\]|\(..|.)|(?P<one>.))"
)
KEPT = {"-": "-", " ": " ", "~": " ", "e": "\\", "\\": "\\", "0": " ", ".": ".", "'": "'", "`": "`"}


def text_of(roff: str) -> str:
    """Return the text of a page in the man macros; "" for a page that only includes another (`.so`)."""
    lines: list[str] = []
    filled, head, table = True, False, False
    for line in re.sub(r"(?<!\\)\\\n", "", roff).splitlines():
        macro, _, rest = line[1:].strip().partition(" ") if line[:1] in (".", "'") else ("", "", line)
        if head:
            head = not line.rstrip().endswith(".")
        elif line[:1] not in (".", "'"):
            cells = CELLS.sub("", rest).strip("\t").replace("\t", "  ") if table else rest
            if cells or not table:
                _add(lines, _plain(cells), filled)
        elif macro == "so":
            return ""
        elif macro in ("SH", "SS", "TH"):
            words = _arguments(rest)
            lines += ["", f"{words[0]}({words[1]})" if macro == "TH" and len(words) > 1 else " ".join(words), ""]
        elif macro in FONTS:
            _add(lines, ("" if len(macro) == 2 and macro[0] != "S" else " ").join(_arguments(rest)), filled)
        elif macro in AS_IT_STANDS or macro in FILLED:
            filled = macro in FILLED
            lines.append("")
            if macro in HEADS or macro == "TE":
                head = table = macro in HEADS
        elif macro in BREAKS:
            lines += ["", *([_arguments(rest)[0], ""] if macro == "IP" and rest.strip() else [])]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def _add(lines: list[str], text: str, filled: bool) -> None:
    """Join a line to its paragraph, or add it as a line of its own."""
    if filled and lines and lines[-1] and text.strip():
        lines[-1] += " " + text.strip()
    else:
        lines.append(text.strip() if filled else text)


def _arguments(rest: str) -> list[str]:
    """Return a macro's arguments without quotes."""
    lexer = shlex.shlex(_plain(rest), posix=True)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters, lexer.escape, lexer.quotes = " ", True, "", "", '"'
    try:
        return list(lexer) or [""]
    except ValueError:  # a quote that is not closed
        return [_plain(rest).replace('"', "")]


def _plain(text: str) -> str:
    """Return a line without comments and escapes."""
    text = re.sub(r'\\["#].*', "", text)
    return ESCAPE.sub(lambda m: CHARACTERS.get(m["named"] or m["pair"] or "", "") or KEPT.get(m["one"] or "", ""), text)
