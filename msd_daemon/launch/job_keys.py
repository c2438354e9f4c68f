"""Keys of a launch: made on the node that they are of; only public ones travel."""

from __future__ import annotations

from pathlib import Path

from msd_daemon.launch.meeting import KEYS, Meeting


class JobKeys:
    """The folder of keys of one node.

    Args:
        folder: On a local disk; what `federation.keys_dir` names.
        own: Names of the node and of the planner here.
        names: Whose public keys are let in.
    """

    def __init__(self, folder: Path, own: list[str], names: list[str]) -> None:
        self.folder = folder
        self._own = own
        self._names = names

    def publish(self, meeting: Meeting) -> None:
        """Make the pairs that are not there yet, and show the public ones to the others.

        Raises:
            ConfigError: They can't be written.
        """
        self.folder.mkdir(mode=0o700, exist_ok=True)
        for name in self._own:
            if not (self.folder / f"{name}.secret").exists():
                _generate(self.folder, name)
            meeting.publish(f"{KEYS}/{name}.pub", (self.folder / f"{name}.pub").read_bytes())

    def missing(self, meeting: Meeting) -> list[str]:
        """Take over the public keys of the others that are there; return whose are not yet."""
        missing = []
        there = set(meeting.names(KEYS))
        for name in self._names:
            target = self.folder / f"{name}.pub"
            if target.exists():
                continue
            content = meeting.read(f"{KEYS}/{name}.pub") if f"{name}.pub" in there else None
            if content is None:
                missing.append(name)
                continue
            beside = self.folder / f".{name}.pub.new"
            beside.write_bytes(content)
            beside.replace(target)
        return missing

    def remove(self) -> None:
        """Remove them: the launch is over."""
        for path in self.folder.glob("*"):
            path.unlink(missing_ok=True)


def _generate(folder: Path, name: str) -> None:
    from federation.key_files import generate

    generate(folder, name)
