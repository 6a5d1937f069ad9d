"""Which series an expression of PromQL names."""

from __future__ import annotations

import re

_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"')
_MATCHERS = re.compile(r"\{[^{}]*\}")
_GROUPINGS = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^()]*\)")
_RANGES = re.compile(r"\[[^\]]*\]|\boffset\s+\w+")
_NAMES = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_WORDS = {"and", "or", "unless", "bool", "inf", "nan", "by", "without", "on", "ignoring"}


def series(expression: str) -> set[str]:
    """Names of the series: every identifier that is no function, keyword, label or variable of a dashboard."""
    text = expression.replace("$__rate_interval", "5m").replace("$__range", "1h")
    text = _STRINGS.sub('""', text)
    for pattern in (_MATCHERS, _GROUPINGS, _RANGES):
        text = pattern.sub(" ", text)
    found = set()
    for match in _NAMES.finditer(text):
        name = match.group()
        is_function = text[match.end() :].lstrip().startswith("(")
        is_number = match.start() > 0 and text[match.start() - 1].isdigit()
        if not is_function and not is_number and name.lower() not in _WORDS:
            found.add(name)
    return found
