"""Facts about the repository that nothing else would notice."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jax_grouped_gemm

ROOT = Path(__file__).resolve().parent.parent
TARGETS = {
    "help",
    "setup",
    "build",
    "demo",
    "test",
    "mutants",
    "model-costs",
    "test-gpu",
    "prove",
    "sanitize",
    "bench",
    "lint",
    "format",
    "wheel",
    "clean",
}


def tracked():
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git working tree")
    return [ROOT / line for line in done.stdout.splitlines() if (ROOT / line).is_file()]


def test_help_lists_every_target():
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")}
    phony = set(re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split())
    assert listed == phony == TARGETS


def test_version_is_written_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["scikit-build"]["metadata"]["version"]["input"] == "jax_grouped_gemm/__init__.py"
    version = jax_grouped_gemm.__version__
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    for name in ("pyproject.toml", "CMakeLists.txt", "jax_grouped_gemm/info.py"):
        assert f'"{version}"' not in (ROOT / name).read_text(), name


def test_built_on_the_headers_of_the_oldest_jax():
    (oldest,) = re.findall(r'"jax>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "requirements.py", "headers"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"jaxlib=={oldest}\n"


def test_readme_links_resolve():
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in target:
            assert (ROOT / target).exists(), target


# Spelt in pieces, so that this file does not contain what it looks for.
PRIVATE = re.compile(
    "|".join(["/" + "home/[a-z]", "/" + "work/", "/" + "Users/", "/" + r"tmp/(?!\$)[a-z]", "/" + "root/"])
)


def test_no_machine_paths():
    found = []
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {line.strip()}" for line in text.splitlines() if PRIVATE.search(line)]
    assert not found
