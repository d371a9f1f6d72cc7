# SPDX-License-Identifier: Apache-2.0
"""What the figures of a benchmark depend on: all code that it may run, by content.

The one idea: follow what a benchmark's file imports, at any depth and anywhere in a function, and compare what is found
there with what was found at the commit that was measured. A claim whose code has changed since is *stale*: it may still
be true, and nobody knows.

- Not a change: comments, docstrings, the form of the code, imports, and a file that moved. So only the syntax tree
  without these counts, and the names of files do not.
- A text that is the name of a module, or the path of a configuration, counts as an import of it. In a benchmark that
  starts processes, so does a text that is the name of a jgr command; the table of all commands (MAIN) is none of the
  others. A package that imports what is asked of it later (`jgr.Engine`) names it in a dictionary, of which only the
  names that are asked for count.
- A field of the configuration counts where a file that is reached names it, outside the sections' own files (SECTIONS);
  what refuses values there does not count, since what was measured was not refused.
- What presents results (PRESENTS) is left out, and what puts the machine into words (DESCRIBES). Data, other packages
  and the machine are not code; a result names them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
import subprocess
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("jgr", "benchmarks", "configs", "tools")
PRESENTS = (
    "benchmarks/pictures.py",
    "benchmarks/titles.py",
    "benchmarks/sources.py",
    "jgr/evaluation/processor.py",
)
DESCRIBES = {"jgr/evaluation/machine.py": "machine"}
"""The function of a file that puts the machine into words."""
COMMANDS = "jgr/cli"
MAIN = f"{COMMANDS}/main.py"
SECTIONS = ("jgr/config/", "jgr/config_", "jgr/config.py", "jgr/feedback.py")
"""Where sections of the configuration stand, and stood."""
SECTION = re.compile(r"\w+Config")
"""The name of a class whose fields are a section of the configuration."""
WORD = re.compile(r"[A-Za-z_]\w*")
HEX = 16

Files = Mapping[str, str]
"""The text of every Python file by its path from the root of the project."""


class Parsed(NamedTuple):
    """imports: names that may be modules. texts: of the code's constants. pairs: of its dictionaries of texts.

    words: the names that it uses, those within texts too. fields: the name of each field of a section, by a digest of
    it. digest: of what the code does, its sections' fields and what refuses their values apart.
    """

    imports: frozenset[str]
    texts: frozenset[str]
    pairs: tuple[tuple[str, str], ...]
    words: frozenset[str]
    fields: tuple[tuple[str, str], ...]
    digest: str


def _told(part: object, into: list[str]) -> None:
    """Tell a syntax tree in words, the same in Python 3.11 to 3.13: without imports, docstrings and what is empty."""
    if isinstance(part, ast.Import | ast.ImportFrom):
        return
    if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant):
        return
    if isinstance(part, ast.JoinedStr):  # 3.12 puts empty texts into some
        part = ast.JoinedStr([one for one in part.values if getattr(one, "value", None) != ""])
    if isinstance(part, ast.AST):
        into.append(type(part).__name__)
        for name, value in ast.iter_fields(part):
            if value is not None and value != [] and name not in ("kind", "type_comment", "type_ignores"):
                into.append(name)
                _told(value, into)
    elif isinstance(part, list):
        into.append("[")
        for one in part:
            _told(one, into)
        into.append("]")
    else:
        into.append(repr(part))


@functools.cache
def parsed(text: str, sections: bool = False, without: str | None = None) -> Parsed:
    """A file's text, taken apart. sections: its classes may be sections of the configuration. without: the name of a
    function that is left out. Raises SyntaxError."""
    tree = ast.parse(text)
    tree.body = [
        part for part in tree.body if not (isinstance(part, ast.FunctionDef) and part.name == without)
    ]
    fields = _without_fields(tree) if sections else ()
    imports, texts, words, pairs = set(), set(), set(), list[tuple[str, str]]()
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings among them
    for node in ast.walk(tree):
        if id(node) not in told:
            words |= set(_words(node))
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imports |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            imports.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.add(node.value)
        elif isinstance(node, ast.Dict):
            for key, value in zip(map(_text, node.keys), map(_text, node.values), strict=True):
                if key is not None and value is not None:
                    pairs.append((key, value))
    return Parsed(frozenset(imports), frozenset(texts), tuple(pairs), frozenset(words), fields, _digest(tree))


def _digest(tree: ast.AST) -> str:
    told: list[str] = []
    _told(tree, told)
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def _words(node: ast.AST) -> Collection[str]:
    """The names that a node uses by itself."""
    if isinstance(node, ast.Attribute):
        return (node.attr,)
    if isinstance(node, ast.keyword):
        return (node.arg,) if node.arg else ()
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return WORD.findall(node.value)
    return ()


def _without_fields(tree: ast.Module) -> tuple[tuple[str, str], ...]:
    """Take the fields of the sections, and what refuses their values, out of a tree: each field's name, and a digest of
    its class and of it."""
    found = []
    for section in tree.body:
        if not (isinstance(section, ast.ClassDef) and SECTION.fullmatch(section.name)):
            continue
        kept: list[ast.stmt] = []
        for part in section.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                found.append(
                    (part.target.id, hashlib.sha256(f"{section.name} {_digest(part)}".encode()).hexdigest())
                )
            elif not (isinstance(part, ast.FunctionDef) and part.name == "__post_init__"):
                kept.append(part)
        section.body = kept
    return tuple(found)


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


class Code:
    """The Python files of one state of the project."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._modules = {_module(path): path for path in files}
        packages = {name: path for name, path in self._modules.items() if path.endswith("__init__.py")}
        later = {
            f"{package}.{name}": self._modules[of]
            for package, path in packages.items()
            for name, of in parsed(files[path], path.startswith(SECTIONS)).pairs
            if of in self._modules
        }
        self._named = {**later, **self._modules}

    def reached(self, path: str) -> set[str]:
        """The paths of all files that the file may run, itself among them; empty where it is not there."""
        seen: set[str] = set()
        # Commands may be named by a file that starts no process itself, so they are followed at the end.
        todo = [path]
        while todo:
            todo = self._direct(todo, seen) or self._commands(seen)
        return seen - set(PRESENTS)

    def digest(self, path: str) -> str:
        """16 hex digits of what the file may run: the same for equal contents, whatever their files are called."""
        return combined(self.contents(path))

    def contents(self, path: str) -> dict[str, str]:
        """What the file may run: the path of each file, and of each field that is named, by its digest."""
        reached = {found: self._parsed(found) for found in sorted(self.reached(path))}
        words = set[str]().union(*(each.words for at, each in reached.items() if not at.startswith(SECTIONS)))
        files = {each.digest: at for at, each in reached.items()}
        fields = {by: at for at, each in reached.items() for name, by in each.fields if name in words}
        return files | fields

    def _parsed(self, path: str) -> Parsed:
        return parsed(self._files[path], path.startswith(SECTIONS), DESCRIBES.get(path))

    def _direct(self, paths: Iterable[str], seen: set[str]) -> list[str]:
        """The files that these name and that were not seen before; these are seen then."""
        fresh = {path for path in paths if path in self._files} - seen
        seen |= fresh
        named: set[str] = set()
        for path in fresh - set(PRESENTS):
            found = self._parsed(path)
            named |= {self._named[name] for name in found.imports if name in self._named}
            if path.endswith("__init__.py"):
                continue
            if path != MAIN:
                named |= {self._modules[text] for text in found.texts if text in self._modules}
            named |= {at for text in found.texts for at in (text, f"configs/{text}")} & self._files.keys()
        return sorted(named - seen)

    def _commands(self, seen: set[str]) -> list[str]:
        """The commands of jgr that benchmarks among the files name, where one of these starts processes."""
        paths = [path for path in seen - set(PRESENTS) if path.startswith("benchmarks/")]
        mine = [self._parsed(path) for path in paths]
        if not any("subprocess" in found.imports for found in mine):
            return []
        named = {f"{COMMANDS}/{text}.py" for found in mine for text in found.texts}
        return sorted(({MAIN, *named} & self._files.keys()) - seen)


def combined(digests: Iterable[str]) -> str:
    """One digest of several, whatever their order."""
    return hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()[:HEX]


def checked_out(root: Path = ROOT) -> Code:
    """The files as they are now."""
    paths = (path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    return Code({path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths})


def at_commit(commit: str, root: Path = ROOT) -> Code:
    """The files of a commit. Raises subprocess.CalledProcessError where git does not have it."""
    listed = _git(root, "ls-tree", "-r", "-z", commit, "--", *FOLDERS).decode()
    blobs = {}
    for line in filter(None, listed.split("\0")):
        described, path = line.split("\t", 1)
        if path.endswith(".py"):
            blobs[path] = described.split()[2]
    return Code(dict(zip(blobs, _texts(root, list(blobs.values())), strict=True)))


def _texts(root: Path, blobs: list[str]) -> list[str]:
    """The contents of git's objects, in their order."""
    found = _git(root, "cat-file", "--batch", given="\n".join(blobs).encode())
    texts, at = [], 0
    for _ in blobs:
        head, at = found[at:].split(b"\n", 1)[0], found.index(b"\n", at) + 1
        size = int(head.split()[2])
        texts.append(found[at : at + size].decode())
        at += size + 1
    return texts


def _git(root: Path, *arguments: str, given: bytes = b"") -> bytes:
    done = subprocess.run(["git", *arguments], cwd=root, input=given, capture_output=True, check=True)
    return done.stdout


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
