# SPDX-License-Identifier: Apache-2.0
"""What pyproject.toml cannot say: configs/ is installed as the package jgr.configs, found beside the others."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["jgr", "jgr.*"]), "jgr.configs"],
    package_dir={"jgr.configs": "configs"},
)
