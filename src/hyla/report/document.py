"""What every page of a report is: one HTML file that needs nothing else and loads nothing from anywhere."""

from __future__ import annotations

import json
from typing import Any

from hyla.errors import MissingExtraError


def check_plotly() -> None:
    """Raise MissingExtraError if a page cannot be written here."""
    try:
        import plotly.offline  # noqa: F401
    except ImportError:
        raise MissingExtraError("plotly", "report", "writing the HTML page") from None


def plotly_js() -> str:
    """Plotly's source, to stand inside a page."""
    check_plotly()
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def script_json(data: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def document(title: str, style: str, main: str, library: str, data_id: str, data: Any, script: str) -> str:
    """The whole page. title: escaped. main: its HTML. script reads `data` from the element `data_id`; it runs after
    `library`, Plotly's source."""
    # Nothing may be loaded from anywhere: the policy makes the browser refuse it.
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{main}
</main>
<script>{library}</script>
<script type="application/json" id="{data_id}">{script_json(data)}</script>
<script>{script}</script>
</body>
</html>
"""
