"""Sphinx settings; build with `make docs`."""

from hyla import __version__

project = "hyla"
author = "The hyla authors"
release = __version__
extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]  # the way GitHub writes displayed equations
html_theme = "furo"
exclude_patterns = ["_build"]
suppress_warnings = ["myst.xref_missing"]
