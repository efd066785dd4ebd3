"""Imports point one way. A room is a folder of the package, a folder of `central`, or a file beside them."""

import ast
import re
from pathlib import Path

import paceline

PACKAGE = Path(paceline.__file__).parent


def room_of(module: str) -> str:
    parts = module.split(".")[1:]
    if parts[:1] == ["central"] and (PACKAGE / "central" / parts[1] if len(parts) > 1 else PACKAGE).is_dir():
        return ".".join(parts[:2])
    return ".".join(parts[:2]) if parts[:1] == ["central"] else (parts or [""])[0]


def imported(path: Path) -> set[str]:
    """Modules that a file imports anywhere in it, also late, but for what only a type checker reads."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("paceline.")}


def test_no_two_rooms_import_each_other() -> None:
    below: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        room = room_of(
            ".".join(("paceline", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        )
        below.setdefault(room, set()).update({room_of(name) for name in imported(path)} - {room})
    below.pop("")  # the public names of all rooms
    while free := [room for room, needs in below.items() if not needs & below.keys()]:
        for room in free:
            del below[room]
    assert not below, {room: sorted(needs & below.keys()) for room, needs in below.items()}


def test_what_a_room_names_is_in_it() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        files = [file for file in path.parent.iterdir() if file.suffix == ".py"]
        there = {file.stem for file in path.parent.iterdir()}
        there |= set(re.findall(r"^(?:def|class) (\w+)", "\n".join(file.read_text() for file in files), re.MULTILINE))
        named = {word for word in re.findall(r"`(\w+)`", text) if word.islower()}
        assert path.parent == PACKAGE or named <= there, (path, named - there)


def test_one_file_unpickles_and_only_what_its_own_children_send() -> None:
    """Whoever unpickles runs what was sent: `samples_message` does, between a process and the workers it has forked."""
    unsafe = re.compile(
        r"^\s*(?:import|from) (?:c?[Pp]ickle|dill|cloudpickle|joblib|shelve|marshal)\b"
        r"|torch\.load\(|(?:send|recv|broadcast|gather|scatter)\w*_object|multiprocessing\.(?:connection|Pipe|Queue)",
        re.MULTILINE,
    )
    found = {path.name for path in PACKAGE.rglob("*.py") if unsafe.search(path.read_text())}
    assert found == {"samples_message.py"}
    users = {path.name for path in PACKAGE.rglob("*.py") if "data.samples_message" in path.read_text()}
    assert users == {"workers.py"}
