"""A page as one HTML file that needs nothing else: no network, no script, light, dark and paper."""

from __future__ import annotations

from pathlib import Path

from growkit.report import drawing
from growkit.report.markup import escape


def document(title: str, top: str, main: str) -> str:
    """The HTML file.

    Args:
        title: of the window, not escaped.
        top: what stands above the sections, as HTML.
        main: the sections.
    """
    style = drawing.style_rules() + Path(__file__).with_name("page.css").read_text("utf-8")
    # The policy makes "no network" a fact that the browser enforces, whatever files contain.
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} – growkit</title>
<style>
{style}</style>
</head>
<body>
{top}
<main>
{main}</main>
</body>
</html>
"""
