"""Sphinx: the pages of this folder, and the reference of the public functions from their docstrings."""

import jlade

project = "jlade"
release = jlade.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "alabaster"
html_theme_options = {"page_width": "1100px", "description": "Exact lookahead decoding for JAX"}

default_role = "code"  # docstrings quote code with single backticks
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_use_ivar = True
napoleon_use_rtype = False
