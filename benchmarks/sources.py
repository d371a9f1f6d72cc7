# SPDX-License-Identifier: Apache-2.0
"""What the figures of a benchmark depend on: all code that it may run, by content.

The one idea: follow what a benchmark runs from definition to definition, through every file, and compare what is found
there with what was found at the commit that was measured. A claim whose code has changed since is *stale*: it may still
be true, and nobody knows.

- A file is taken apart into its functions, classes and constants, and the rest, which runs where the file is imported.
  A definition counts where one that counts names it; a class counts whole. What a name may mean in two ways counts in
  both, and a module that is handed on as a value counts whole.
- Not a change: comments, docstrings, types of functions, the form of the code, imports, and what moved to another file.
  So only the syntax tree without these counts, and the names of files do not.
- A text that is the name of a module, or the path of a configuration, counts as all of it; that of a package with a dot
  behind it as all below. In a benchmark that starts processes, a text that is the name of a jgr command counts as that
  command; the table of all commands (MAIN) is none of the others. A package that imports what is asked of it later
  (`jgr.Engine`) names it in a dictionary, of which only the names that are asked for count.
- A field of the configuration counts where a definition that counts names it, outside the sections' own files
  (SECTIONS); what refuses values there does not count, since what was measured was not refused.
- What presents results (PRESENTS) is left out, and what puts them and the machine into words (DESCRIBES). Data, other
  packages and the machine are not code; a result names them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
DESCRIBES = {
    "benchmarks/harness.py": ("commit", "describe", "read_result", "source_hash"),
    "jgr/evaluation/machine.py": ("commit", "machine"),
}
"""The functions of a file that put a result, or the machine, into words."""
COMMANDS = "jgr/cli"
MAIN = f"{COMMANDS}/main.py"
SECTIONS = ("jgr/config/", "jgr/config_", "jgr/config.py", "jgr/feedback.py")
"""Where sections of the configuration stand, and stood."""
SECTION = re.compile(r"\w+Config")
"""The name of a class whose fields are a section of the configuration."""
WORD = re.compile(r"[A-Za-z_]\w*")
SILENT = ("kind", "type_comment", "type_ignores")
"""Fields of syntax trees that say nothing of what the code does."""
HEX = 16
IMPORTED, STARTED, WHOLE = "", "if __name__ == '__main__'", "*"
"""Parts of a file that have no name of their own: what runs where it is imported, what runs besides where it is
started, and all of it but the latter."""

Files = Mapping[str, str]
"""The text of every Python file by its path from the root of the project."""
Chain = tuple[str, ...]
"""A name and the attributes that are asked of it: ("a", "b", "c") for a.b.c."""
At = tuple[str, str]
"""A file, and the name of one of its parts."""


class Part(NamedTuple):
    """One definition of a file, or the rest.

    digest: of what the code does. uses: the names that it asks for. imports: modules, and names that may be modules,
    whose import it runs. texts: of its constants. words: the names of fields that it may use, those within texts too.
    """

    digest: str
    uses: frozenset[Chain]
    imports: frozenset[str]
    texts: frozenset[str]
    words: frozenset[str]


class Parsed(NamedTuple):
    """A file, taken apart.

    parts: by name. where: the part in which each name of the file gets its value. bound: what each name that it imports
    may be: (module, ""), or a module and a name in it. later: texts by texts, of its dictionaries. fields: the name of
    each field of a section by a digest of it.
    """

    parts: Mapping[str, Part]
    where: Mapping[str, str]
    bound: Mapping[str, frozenset[tuple[str, str]]]
    later: Mapping[str, str]
    fields: Mapping[str, str]


class _Reader(ast.NodeVisitor):
    """Reads what a part may run: without annotations of functions, docstrings, and imports for types alone."""

    def __init__(self) -> None:
        self.uses, self.imports = set[Chain](), set[str]()
        self.texts, self.words = set[str](), set[str]()

    def visit_Import(self, node: ast.Import) -> None:
        self.imports |= {alias.name for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module and not node.level:
            self.imports |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}

    def visit_If(self, node: ast.If) -> None:
        if _is_name(node.test, "TYPE_CHECKING"):
            node = ast.If(ast.Constant(value=False), [], node.orelse)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for part in (*node.decorator_list, node.args, *node.body):
            self.visit(part)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_arg(self, node: ast.arg) -> None:
        """An annotation of a parameter runs nothing."""

    def visit_Name(self, node: ast.Name) -> None:
        self.uses.add((node.id,))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        chain, at = [node.attr], node.value
        while isinstance(at, ast.Attribute):
            chain, at = [at.attr, *chain], at.value
        self.words |= set(chain)
        if isinstance(at, ast.Name):
            self.uses.add((at.id, *chain))
        else:
            self.visit(at)

    def visit_keyword(self, node: ast.keyword) -> None:
        self.words |= {node.arg} if node.arg else set()
        self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.texts.add(node.value)
            self.words |= set(WORD.findall(node.value))


@functools.cache
def parsed(text: str, sections: bool = False) -> Parsed:
    """A file's text, taken apart. sections: its classes may be sections of the configuration. Raises SyntaxError."""
    tree = ast.parse(text)
    fields = _without_fields(tree) if sections else {}
    own = {name for node in tree.body for name in _defined(node)}
    nodes: dict[str, list[ast.stmt]] = {IMPORTED: []}
    where: dict[str, str] = {}
    bound: dict[str, frozenset[tuple[str, str]]] = {}
    later: dict[str, str] = {}
    for node in ast.walk(tree):
        for name, target in _bindings(node):
            bound[name] = bound.get(name, frozenset()) | {target}
            own |= {name} if target[0].split(".")[0] in FOLDERS else set()
        if isinstance(node, ast.Dict):
            for key, value in zip(map(_text, node.keys), map(_text, node.values), strict=True):
                if key is not None and value is not None:
                    later[key] = value
    for node in tree.body:
        part = _part_of(node, own)
        nodes.setdefault(part, []).append(node)
        where |= dict.fromkeys(_defined(node), part)
    parts = {name: _read(of) for name, of in nodes.items()}
    return Parsed(parts, where, bound, later, fields)


def _part_of(node: ast.stmt, own: Collection[str]) -> str:
    """The part of a file that a statement belongs to. own: names of this project, whose calls may do anything."""
    if (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Compare)
        and _is_name(node.test.left, "__name__")
    ):
        return STARTED
    names = _defined(node)
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        # A decorator of ours may keep it in a table.
        kept = any(name.id in own for decorator in node.decorator_list for name in _names(decorator))
        return IMPORTED if kept or node.name.startswith("__") else node.name
    calls = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    if len(names) == 1 and not any(each.id in own for call in calls for each in _names(call)):
        return names[0]
    return IMPORTED


def _defined(node: ast.stmt) -> list[str]:
    """The names that a statement of a file gives a value to, imports and what stands within blocks apart."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [each.id for target in node.targets for each in _names(target)]
    if isinstance(node, ast.AnnAssign):
        return [each.id for each in _names(node.target)]
    if isinstance(node, ast.If | ast.Try | ast.With | ast.For):
        return [
            name
            for each in ast.iter_child_nodes(node)
            if isinstance(each, ast.stmt)
            for name in _defined(each)
        ]
    return []


def _names(node: ast.AST) -> Iterator[ast.Name]:
    return (each for each in ast.walk(node) if isinstance(each, ast.Name))


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _bindings(node: ast.AST) -> Iterator[tuple[str, tuple[str, str]]]:
    """What an import gives to each name."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.split(".")[0]
            yield alias.asname or top, (alias.name if alias.asname else top, "")
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        for alias in node.names:
            yield alias.asname or alias.name, (node.module, alias.name)


def _read(nodes: Sequence[ast.stmt]) -> Part:
    reader = _Reader()
    for node in nodes:
        reader.visit(node)
    found = (reader.uses, reader.imports, reader.texts, reader.words)
    return Part(_digest(list(nodes)), *map(frozenset, found))  # type: ignore[arg-type]


def _told(part: object, into: list[str]) -> None:
    """Tell a syntax tree in words, the same in Python 3.11 to 3.13: without imports, docstrings, the types of functions
    and what is empty."""
    if isinstance(part, ast.Import | ast.ImportFrom):
        return
    if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant):
        return
    if isinstance(part, ast.JoinedStr):  # 3.12 puts empty texts into some
        part = ast.JoinedStr([one for one in part.values if getattr(one, "value", None) != ""])
    if isinstance(part, ast.AST):
        into.append(type(part).__name__)
        for name, value in ast.iter_fields(part):
            types = name == "returns" or (name == "annotation" and isinstance(part, ast.arg))
            if value is not None and value != [] and not types and name not in SILENT:
                into.append(name)
                _told(value, into)
    elif isinstance(part, list):
        into.append("[")
        for one in part:
            _told(one, into)
        into.append("]")
    else:
        into.append(repr(part))


def _digest(tree: object) -> str:
    told: list[str] = []
    _told(tree, told)
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def _without_fields(tree: ast.Module) -> dict[str, str]:
    """Take the fields of the sections, and what refuses their values, out of a tree: the name of each field by a digest
    of its class and of it."""
    found = {}
    for section in tree.body:
        if not (isinstance(section, ast.ClassDef) and SECTION.fullmatch(section.name)):
            continue
        kept: list[ast.stmt] = []
        for part in section.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                digest = hashlib.sha256(f"{section.name} {_digest(part)}".encode()).hexdigest()
                found[digest] = part.target.id
            elif not (isinstance(part, ast.FunctionDef) and part.name == "__post_init__"):
                kept.append(part)
        section.body = kept
    return found


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


class Code:
    """The Python files of one state of the project."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._modules = {_module(path): path for path in files}
        self._meant: dict[tuple[str, Chain], set[At]] = {}

    def reached(self, path: str) -> set[At]:
        """The parts of all files that the file may run where it is started; empty where it is not there."""
        seen: set[At] = set()
        todo = [(path, STARTED)] if path in self._files else []
        # Commands may be named by a file that starts no process itself, so they are followed at the end.
        while todo:
            while todo:
                todo += self._direct(todo.pop(), seen)
            todo = self._commands(seen)
        return {(at, part) for at, part in seen if part in self._parsed(at).parts}

    def digest(self, path: str) -> str:
        """16 hex digits of what the file may run: the same for equal contents, whatever their files are called."""
        return combined(self.contents(path))

    def contents(self, path: str) -> dict[str, str]:
        """What the file may run: where each part is, and the file of each field that is named, by its digest."""
        reached = {at: self._parsed(at[0]).parts[at[1]] for at in sorted(self.reached(path))}
        words = set[str]().union(
            *(part.words for (at, _), part in reached.items() if not at.startswith(SECTIONS))
        )
        parts = {part.digest: f"{at}: {name}" if name else at for (at, name), part in reached.items()}
        files = {at for at, _ in reached}
        fields = {by: at for at in files for by, name in self._parsed(at).fields.items() if name in words}
        return parts | fields

    def _parsed(self, path: str) -> Parsed:
        return parsed(self._files[path], path.startswith(SECTIONS))

    def _direct(self, at: At, seen: set[At]) -> list[At]:
        """What a part runs and was not seen before; it is seen then."""
        path, name = at
        if at in seen or _left_out(path, name):
            return []
        seen.add(at)
        found = self._parsed(path)
        if name == WHOLE:
            return [(path, each) for each in found.parts if each != STARTED]
        runs = {(path, IMPORTED)}
        if name not in found.parts:
            return sorted(runs - seen)
        part = found.parts[name]
        for module in part.imports:
            runs |= self._import(module)
        for chain in part.uses:
            runs |= self._used(path, chain)
        if not path.endswith("__init__.py"):
            for text in part.texts:
                runs |= self._named(text, path)
        return sorted(runs - seen)

    def _import(self, module: str) -> set[At]:
        """What runs where a module is imported: it, and the packages that it is in."""
        names = module.split(".")
        packages = (".".join(names[: n + 1]) for n in range(len(names)))
        return {(self._modules[each], IMPORTED) for each in packages if each in self._modules}

    def _named(self, text: str, path: str) -> set[At]:
        """What a text in a file stands for: a module, all modules of a package, a file."""
        files = {text, f"configs/{text}"} & self._files.keys()
        if path != MAIN:
            files |= {self._modules[text]} if text in self._modules else set()
            if text.endswith(".") and text[:-1] in self._modules and text[:-1] not in FOLDERS:
                files |= {at for module, at in self._modules.items() if module.startswith(text)}
        return {(at, part) for at in files for part in (WHOLE, STARTED)}

    def _used(self, path: str, chain: Chain) -> set[At]:
        """What a name in a file, with attributes, may be."""
        found = self._parsed(path)
        name, *rest = chain
        meant = {(path, found.where[name])} if name in found.where else set()
        for module, of in found.bound.get(name, ()):
            meant |= self._of(module, (of, *rest) if of else tuple(rest))
        return meant

    def _of(self, module: str, chain: Chain) -> set[At]:
        """What attributes of a module may be; all of it where none is asked for."""
        if (module, chain) in self._meant:
            return self._meant[module, chain]
        meant = self._meant[module, chain] = set()  # where names go round in a circle
        path = self._modules.get(module)
        if not chain:
            meant |= {(path, WHOLE)} if path else set()
            return meant
        name, *rest = chain
        if f"{module}.{name}" in self._modules:
            meant |= self._of(f"{module}.{name}", tuple(rest))
        if path:
            meant |= self._used(path, chain)
            later = self._parsed(path).later.get(name, "")
            if path.endswith("__init__.py") and later in self._modules:
                meant |= self._of(later, chain) | self._import(later)
        return meant

    def _commands(self, seen: set[At]) -> list[At]:
        """The commands of jgr that benchmarks name, where one of these starts processes."""
        mine = {at for at in seen if at[0].startswith("benchmarks/")}
        parts = [found for path, name in mine if (found := self._parsed(path).parts.get(name))]
        if not any("subprocess" in part.imports for part in parts):
            return []
        named = {f"{COMMANDS}/{text}.py" for part in parts for text in part.texts}
        files = {MAIN, *named} & self._files.keys()
        return sorted({(path, WHOLE) for path in files} - seen)


def _left_out(path: str, part: str) -> bool:
    return path in PRESENTS or part in DESCRIBES.get(path, ())


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
