"""The design as a test: which file may know which, and who may ask about hardware.

The files are read as text, so that a forbidden import fails here even where it would work.
"""

from __future__ import annotations

import ast
import graphlib
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import devicekit
import devicekit.testing

PACKAGE = Path(devicekit.__file__).parent

# From the bottom up. An import may only go down; a package counts as one entry.
LAYERS = (
    ("_types",),
    ("errors",),
    ("_backends", "_tree"),
    ("_device", "_inspect", "testing"),
    ("_move",),
    ("_wrap", "_prefetch", "_diagnose"),
    ("__init__", "__main__"),
)
LEVEL = {entry: level for level, entries in enumerate(LAYERS) for entry in entries}
LONGEST_FILE = 400  # lines

# What tells of hardware. Only _backends may ask; the exceptions say what for.
HARDWARE = (
    *("torch.cuda", "torch.mps", "torch.xpu", "torch.mtia", "torch.hpu", "torch.npu", "torch.cpu"),
    *("torch.accelerator", "torch.backends", "torch.version", "torch._C", "torch.__config__"),
    *("torch.get_device_module", "os.environ", "os.environb", "os.getenv", "os.sysconf"),
)
HARDWARE_MODULES = ("ctypes", "platform", "pynvml", "subprocess")
ALLOWED = {
    ("_move.transfer", "torch.get_device_module"),  # waits for copies it has issued itself
    ("_prefetch", "torch.get_device_module"),  # copies on a stream of its own
    ("testing", "os.environ"),  # under the variables of the fake machine
}
# What would change the process for everybody in it.
GLOBAL_STATE = (
    *("os.putenv", "os.unsetenv", "os.environ.update", "os.environ.setdefault", "os.environ.pop"),
    *("torch.set_default_device", "torch.set_default_dtype", "torch.manual_seed"),
    *("torch.cuda.set_device", "torch.accelerator.set_device_index"),
    *("logging.basicConfig", "logging.disable", "warnings.filterwarnings"),
)


@dataclass(frozen=True)
class Module:
    """One file of the package, parsed."""

    path: Path

    @property
    def parts(self) -> tuple[str, ...]:
        return self.path.relative_to(PACKAGE).with_suffix("").parts

    @property
    def name(self) -> str:
        """`_device.choice`; a package goes by its own name, the root by `__init__`."""
        inner = self.parts[:-1] if self.parts[-1] == "__init__" else self.parts
        return ".".join(inner) or "__init__"

    @property
    def entry(self) -> str:
        return self.name.partition(".")[0]

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))


MODULES = {module.name: module for module in map(Module, sorted(PACKAGE.rglob("*.py")))}
each_module = pytest.mark.parametrize("module", MODULES.values(), ids=MODULES.keys())


# ---- files and layers ----------------------------------------------------------------------------


def test_every_file_has_a_place_in_the_layers() -> None:
    assert {module.entry for module in MODULES.values()} <= LEVEL.keys()


@each_module
def test_imports_only_go_down(module: Module) -> None:
    wrong = [
        target
        for target, typing_only in imports_of(module)
        if entry_of(target) != module.entry
        and LEVEL[entry_of(target)] >= LEVEL[module.entry] + typing_only
    ]

    assert wrong == []


@each_module
def test_nothing_inside_imports_from_the_package_root(module: Module) -> None:
    assert "__init__" not in [target for target, _ in imports_of(module)]


@each_module
def test_imports_are_absolute(module: Module) -> None:
    relative = [n for n in ast.walk(module.tree) if isinstance(n, ast.ImportFrom) and n.level]

    assert relative == []


def test_files_can_be_put_in_an_order() -> None:
    graph = {
        name: {target for target, typing_only in imports_of(module) if not typing_only}
        for name, module in MODULES.items()
    }

    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError

    assert order[-1] in ("__init__", "__main__", "testing")


@each_module
def test_files_stay_short(module: Module) -> None:
    lines = module.path.read_text(encoding="utf-8").count("\n")

    assert lines <= LONGEST_FILE


def test_the_layer_test_sees_a_forbidden_import() -> None:
    tree = ast.parse("from devicekit import move\nimport devicekit._move.modules\n")

    assert [target for target, _ in imports_in(tree)] == ["__init__", "_move.modules"]


# ---- who asks what -------------------------------------------------------------------------------


@each_module
def test_only_backends_asks_about_hardware(module: Module) -> None:
    if module.entry == "_backends":
        return

    asked = {
        (module.name, root)
        for name in names_used(module.tree)
        for root in (*HARDWARE, *HARDWARE_MODULES)
        if name == root or name.startswith(f"{root}.")
    }

    assert asked <= ALLOWED


def test_no_exception_is_kept_longer_than_it_is_needed() -> None:
    for name, question in ALLOWED:
        assert any(used.startswith(question) for used in names_used(MODULES[name].tree)), name


@each_module
def test_nothing_uses_pytree(module: Module) -> None:
    assert "_pytree" not in module.path.read_text(encoding="utf-8")


@each_module
def test_nothing_changes_what_belongs_to_the_process(module: Module) -> None:
    written = [
        ast.unparse(node)
        for node in ast.walk(module.tree)
        if isinstance(node, (ast.Subscript, ast.Attribute))
        and isinstance(node.ctx, (ast.Store, ast.Del))
        and ast.unparse(node).startswith(("os.environ", "torch.", "logging."))
    ]

    assert written == []
    assert names_used(module.tree).isdisjoint(GLOBAL_STATE)


def test_the_hardware_test_sees_every_way_to_ask() -> None:
    ways = (
        ("import torch\ntorch.cuda.is_available()", "torch.cuda.is_available"),
        ("import torch.cuda as c\nc.device_count()", "torch.cuda.device_count"),
        ("from torch import cuda\ncuda.init()", "torch.cuda.init"),
        ("from os import environ\nenviron['A']", "os.environ"),
        ("import torch\ngetattr(torch, 'cuda')", "torch.cuda"),
    )

    for code, name in ways:
        assert name in names_used(ast.parse(code)), code


# ---- docstrings and doors ------------------------------------------------------------------------


@each_module
def test_modules_have_a_docstring(module: Module) -> None:
    assert ast.get_docstring(module.tree)


@each_module
def test_all_is_sorted_and_exact(module: Module) -> None:
    if module.name == "__main__":
        return
    exported = assigned_all(module.tree)

    assert exported == sorted(set(exported), key=isort_style)
    assert set(exported) <= set(top_level_names(module.tree))
    functions_and_classes = {
        node.name for node in module.tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    assert {name for name in functions_and_classes if name[0] != "_"} <= set(exported)


@each_module
def test_files_take_from_others_what_these_export(module: Module) -> None:
    taken = {
        (without_root(node.module or ""), alias.name)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("devicekit")
        for alias in node.names
    }

    hidden = {
        (source, name)
        for source, name in taken
        if f"{source}.{name}" not in MODULES and name not in assigned_all(MODULES[source].tree)
    }
    assert hidden == set()


def test_public_names_are_those_in_all() -> None:
    there = {
        name
        for name, value in vars(devicekit).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }

    assert devicekit.__all__ == sorted(there)


def test_the_door_holds_no_logic() -> None:
    kinds = {type(node) for node in MODULES["__init__"].tree.body}

    assert kinds <= {ast.Expr, ast.ImportFrom, ast.Assign}


def test_public_modules_are_errors_and_testing() -> None:
    public = {module.entry for module in MODULES.values() if not module.entry.startswith("_")}

    assert public == {"errors", "testing"}


@pytest.mark.parametrize("name", [*devicekit.__all__, "testing.fake_devices"])
def test_annotations_can_be_resolved_at_run_time(name: str) -> None:
    value: object = devicekit
    for part in name.split("."):
        value = getattr(value, part)

    if callable(value):
        typing.get_type_hints(value.__init__ if isinstance(value, type) else value)


# ---- reading -------------------------------------------------------------------------------------


def entry_of(target: str) -> str:
    return target.partition(".")[0]


def imports_of(module: Module) -> list[tuple[str, bool]]:
    """Return the files of the package that a file imports, and whether for annotations only."""
    return list(imports_in(module.tree))


def imports_in(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    for_typing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        for target in targets_of(node):
            yield target, id(node) in for_typing


def targets_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        module = node.module or ""
        submodules = [f"{module}.{alias.name}" for alias in node.names]
        names = [name if without_root(name) in MODULES else module for name in submodules]
    else:
        return
    yield from dict.fromkeys(
        without_root(name) for name in names if name.partition(".")[0] == "devicekit"
    )


def without_root(name: str) -> str:
    return name.partition(".")[2] or "__init__"


def names_used(tree: ast.Module) -> set[str]:
    """Return every dotted name that is used, written out from the module that it starts in."""
    known: dict[str, str] = {}
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names}
            for alias in node.names:
                root = alias.name.partition(".")[0]
                known[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                used.add(f"{node.module}.{alias.name}")
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)):
            first, _, rest = ast.unparse(node).partition(".")
            if first in known:
                used.add(f"{known[first]}.{rest}" if rest else known[first])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            name = node.args[1]
            text = name.value if isinstance(name, ast.Constant) else "*"
            used.add(f"{ast.unparse(node.args[0])}.{text}")
    return used


def assigned_all(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            value: list[str] = ast.literal_eval(node.value)
            return value
    pytest.fail("no __all__")


def top_level_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (name.id for name in node.targets if isinstance(name, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)


def isort_style(name: str) -> tuple[int, str]:
    """CONSTANTS, then Classes, then functions, as ruff sorts `__all__`."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)
