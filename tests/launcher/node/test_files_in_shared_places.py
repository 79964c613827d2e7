"""Who makes, opens and removes files: each place is known, and what others can write to is
opened by plain_file.py.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[3]
Place = tuple[str, str, str]  # file, function, call

REMOVING = ("unlink", "rmtree", "rmdir", "removedirs", "remove")
MAKING = ("mkfifo", "symlink", "symlink_to", "touch", "write_text", "write_bytes", "rename", "replace")

# Every removal, and every file that is made or written other than by open_plain(),
# with the reason why that is right.
KNOWN: dict[Place, str] = {
    ("backends/known_hosts.py", "_File.add", "open"):
        "ssh's own file in the user's home, as ssh writes it",
    ("command_line/help_screen.py", "HelpScreen.write_text", "super().write_text"):
        "a method of click's formatter, no file",
    ("command_line/numerics.py", "_folder", "folder.rmdir"): "a folder that was made here, if it is empty",
    ("command_line/numerics.py", "_folder", "shutil.rmtree"): "a folder that mkdtemp() made; links as links",
    ("fit/rehearse.py", "_Rehearsal.begin", "asked.write_text"): "in a TemporaryDirectory of its own",
    ("fit/rehearse.py", "_Rehearsal.__init__", "path.write_text"): "in a TemporaryDirectory of its own",
    ("run/tune_job.py", "_without_section", "path.write_text"): "in a TemporaryDirectory of its own",
    ("fit/rehearse.py", "_Rehearsal.begin", "open"): "in a TemporaryDirectory of its own",
    ("fit/rehearse.py", "_Rehearsal.begin", "given.write_text"): "in a TemporaryDirectory of its own",
    ("fit/scratch_folder.py", "_remove_if_left", "shutil.rmtree"):
        "a folder of this user alone that scratch_folder() made; links as links",
    ("fit/scratch_folder.py", "scratch_folder", "Path(name, MARK).touch"):
        "in a TemporaryDirectory of its own",
    ("external/runner.py", "run_owned", "Path(path).write_text"): "in a TemporaryDirectory of its own",
    ("output/log_files.py", "_link_latest", "new.replace"):
        "a link that was made the line before, over a link of an earlier run",
    ("output/log_files.py", "_link_latest", "new.symlink_to"): "a name that nothing has, or it fails",
    ("output/log_files.py", "_link_latest", "new.unlink"): "the link that was made the line before",
    ("node/workers/milestones.py", "MilestonePipe.__init__", "os.mkfifo"): "in the agent's own folder",
    ("node/observe/metrics.py", "MetricsReader.__init__", "os.mkfifo"): "in the agent's own folder",
    ("node/observe/metrics.py", "MetricsReader.close", "os.unlink"): "the same",
    ("output/event_files.py", "EventRing._turn", "os.replace"): "in the folder of the job's record",
    ("node/system/pid_file.py", "_remove_if_stale", "os.unlink"):
        "a regular file of this user with the pid of a process that is gone",
    ("node/system/pid_file.py", "write_pid_file", "os.unlink"):
        "the file that was made some lines before, on a disk that takes nothing",
    ("node/system/private_folder.py", "PrivateFolder.file", "os.unlink"): "in the agent's own folder",
    ("node/system/private_folder.py", "PrivateFolder.clear", "os.unlink"): "as above",
    ("node/system/private_folder.py", "PrivateFolder.remove_outside", "os.unlink"):
        "a file that the agent made, found by its identity",
    ("node/system/private_folder.py", "_make_folder", "os.rename"): "the folder that it has made",
    ("node/system/private_folder.py", "_remove_folder", "os.rmdir"): "the agent's own folder",
    ("node/system/private_folder.py", "_remove_folder", "shutil.rmtree"): "the same; links as links",
    ("output/job_report.py", "put_file", "partial.unlink"): "the new file beside it, made some lines before",
    ("output/job_report.py", "write_report", "path.write_text"): "/dev and /proc only",
    ("node/files/sync_commit.py", "_move", "os.rename"): "--sync: no link is followed on the way",
    ("node/files/sync_commit.py", "_move_across", "os.rename"): "as above",
    ("node/files/sync_commit.py", "Commit._stage", "os.symlink"):
        "in .dslaunch, a name that was removed just before, in a folder that was reached without links",
    ("node/files/sync_contents.py", "SyncContents.end", "os.rename"): "both names are in .dslaunch",
    ("node/files/sync_receiver.py", "Receiver._beat", "self._record.touch"):
        "the time of the lock that is open, by its descriptor",
    ("node/files/sync_receiver.py", "Receiver._next_item", "self._record.touch"): "as above",
    ("node/files/sync_folder.py", "Folder.remove", "os.rmdir"): "no link is followed; it was compared",
    ("node/files/sync_folder.py", "Folder.remove", "os.unlink"): "as above",
    ("node/files/sync_folder.py", "write_whole", "os.rename"): "both names are in .dslaunch",
    ("page/page_file.py", "write_page", "path.write_bytes"): "/dev and /proc only",
    ("sync/collector.py", "Collector._lose", "os.unlink"): "the new file, made some lines before",
    ("sync/collector.py", "Collector._put", "os.replace"): "over nothing, or a file of this job",
    ("sync/collector.py", "Collector._put", "os.unlink"): "the new file, of which there is an equal one",
    ("sync/collector.py", "Collector.lose", "os.unlink"): "the new file, which is cut off",
    ("sync/collector.py", "Collector._open", "os.unlink"): "a new file of a job that was killed",
    ("sync/digest_cache.py", "DigestCache.write", "os.replace"): "in the user's cache folder",
    ("sync/target.py", "Marker.close", "os.rmdir"): "an empty folder that was made before",
    ("sync/target.py", "Marker.close", "os.unlink"): "a file with a random name that was made before",
    ("node/workers/preload.py", "_prepared", "open"): "in the agent's own folder",
    ("node/workers/starter.py", "Starter.ask_to_end", "open"): "in the agent's own folder",
    ("node/workers/starter.py", "Starter.ask_to_end", "os.replace"): "the same",
    ("registry/journal.py", "JournalFile._make", "os.replace"): "in the folder of the job's record",
    ("registry/known_jobs.py", "_remove_half_made", "shutil.rmtree"): "a folder that has no record yet",
    ("registry/known_jobs.py", "_remove_silent", "shutil.rmtree"): "a job's folder in the registry",
    ("registry/known_jobs.py", "clean", "shutil.rmtree"): "an old record; it removes links as links",
    ("registry/own_entry.py", "OwnEntry.remove", "shutil.rmtree"): "the folder of this job's record",
    ("registry/record.py", "_replace", "os.replace"): "in the folder of the job's record",
    ("registry/record.py", "write_record", "os.unlink"): "the same: room that was reserved",
    ("run/drill_job.py", "_run_here", "(folder / 'output').open"): "in a TemporaryDirectory of its own",
    ("run/known_limits.py", "keep_limits", "partial.write_text"): "in the user's own state folder",
    ("run/run_detached.py", "start_detached", "shutil.rmtree"): "the folder that was made some lines before",
    ("sync/trace_files.py", "TraceFiles.empty", "shutil.rmtree"): "the folder that mkdtemp made",
    ("sync/trace_files.py", "TraceFiles.forget", "shutil.rmtree"): "the same",
    ("trace/merge.py", "write_merged", "os.replace"): "where --trace_to says, or a name that no file has",
    ("trace/merge.py", "write_merged", "os.unlink"): "the new file beside it, of a job that was killed",
    ("node/workers/worker_hook.py", "install_hook", "open"): "in a folder that was made the line before",
    ("output/writer.py", "unbuffered", "open"): "/dev/null, and the standard streams",
}  # fmt: skip


def places_in(source: str, file: str) -> set[Place]:
    """Each call that removes a file, or makes or writes one."""
    found: set[Place] = set()

    def look(node: ast.AST, where: tuple[str, ...]) -> None:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            where = (*where, node.name)
        if isinstance(node, ast.Call) and _touches_a_file(node):
            found.add((file, ".".join(where), ast.unparse(node.func)))
        for child in ast.iter_child_nodes(node):
            look(child, where)

    look(ast.parse(source), ())
    return found


def _touches_a_file(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if owner == "formatter":  # click's, which writes to no file
        return False
    if name == "remove":
        return owner == "os"
    if name in ("replace", "rename"):  # of a file, not of text
        return owner in ("os", "new") or "path" in owner.lower()
    if name in REMOVING or name in MAKING:
        return True
    if name != "open" or owner == "os" or not call.args:  # os.open is looked at below
        return False
    mode = call.args[0 if owner else 1] if len(call.args) > (0 if owner else 1) else None
    is_written = (
        isinstance(mode, ast.Constant) and isinstance(mode.value, str) and set(mode.value) & set("wax+")
    )
    first = ast.unparse(call.args[0])
    return bool(is_written) and first not in ("fd",) and not first.startswith("open_plain(")


def test_every_file_that_is_made_or_removed_is_known() -> None:
    found: set[Place] = set()
    for path in sorted((CHECKOUT / "launcher").rglob("*.py")):
        found |= places_in(path.read_text(), str(path.relative_to(CHECKOUT / "launcher")))
    assert sorted(found - KNOWN.keys()) == [], (
        "open it with open_plain(), or say here why it is right as it is"
    )
    assert sorted(KNOWN.keys() - found) == []


FOLLOWS_LINKS = {
    "collecting.py: os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)":
        "what a person names with --collect, read only",
    "event_reader.py: os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)":
        "events that a person names, read only; in the folder of a job's record no other user writes",
    "sync_place.py: os.open(b'/', os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)": "the root is no link",
    "sync_place.py: os.open(b'.', os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)":
        "a folder that is open already, and was opened without following a link",
}  # fmt: skip


@pytest.mark.slow
def test_os_open_follows_no_link_where_others_can_write() -> None:
    """Apart from /dev/null, every os.open() of the launcher refuses links,
    or makes a file that was not there.

    What a person names is only read, and may be a link: named_file.py.
    """
    wrong = []
    for path in sorted((CHECKOUT / "launcher").rglob("*.py")):
        if path.name == "named_file.py":
            continue
        tree = ast.parse(path.read_text())
        flags = {
            ast.unparse(one.targets[0]): ast.unparse(one.value)
            for one in tree.body
            if isinstance(one, ast.Assign)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "os.open":
                text = ast.unparse(node)
                meant = [text, *(flags.get(ast.unparse(one), "") for one in node.args)]
                if not any(one in str(meant) for one in ("os.devnull", "O_NOFOLLOW", "O_EXCL", "_NEVER")):
                    wrong.append(f"{path.name}: {text}")
    assert sorted(wrong) == sorted(FOLLOWS_LINKS)


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("os.unlink(path)", True),
        ("shutil.rmtree(folder)", True),
        ("Path(name).write_text('x')", True),
        ("open(path, 'w')", True),
        ("path.open('a')", True),
        ("open(path)", False),
        ("open(path, 'rb')", False),
        ("open(open_plain(path, flags), 'wb')", False),
        ("text.replace('a', 'b')", False),
        ("names.remove(one)", False),
    ],
)  # fmt: skip
def test_what_counts_as_making_or_removing(source: str, is_found: bool) -> None:
    assert bool(places_in(source, "a.py")) == is_found
