"""Settings of Sphinx for the site, which `make site` builds; make_site.py lays out its pages."""

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))  # noqa: PTH120 - Sphinx runs this file as it is
from make_site import VERSION

project = f"nc {VERSION}"
project_copyright = "the nc contributors"
release = version = VERSION
extensions = ["myst_nb", "sphinxcontrib.mermaid"]

myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4  # links to headings are those of GitHub
suppress_warnings = [
    "myst.header"
]  # docs/reference/functions.md has a heading of the first level for each module

nb_execution_mode = "force"  # the tutorials' outputs are those of this build
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_merge_streams = True
nb_output_stderr = "remove"  # progress bars, and warnings that name files of the building machine

html_theme = "furo"
html_title = f"nc {VERSION}"
html_static_path: list[str] = []
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "versions.html",
        "sidebar/scroll-end.html",
    ]
}
templates_path = ["templates"]
html_copy_source = False
html_show_sphinx = False
