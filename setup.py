"""The project's addresses in the metadata, which are those of the repository whose workflow builds the package.

GitHub's workflows set GITHUB_SERVER_URL and GITHUB_REPOSITORY. A build without them has no addresses, so that no copy
of the project names a home that is not its own. All else is in setup.cfg.
"""

from __future__ import annotations

import os

from setuptools import setup


def project_urls() -> dict[str, str]:
    """Label -> address."""
    server, repository = os.environ.get("GITHUB_SERVER_URL", ""), os.environ.get("GITHUB_REPOSITORY", "")
    if not server or not repository:
        return {}
    home = f"{server}/{repository}"
    pages = {"Documentation": "tree/main/docs", "Issues": "issues", "Changelog": "blob/main/CHANGELOG.md"}
    return {"Source": home, **{label: f"{home}/{path}" for label, path in pages.items()}}


setup(project_urls=project_urls())
