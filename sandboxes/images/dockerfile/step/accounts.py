"""Users of an image, which its own files describe."""

from . import StepError


class ImageUser:
    """A user, by name or number, as /etc/passwd and /etc/group inside describe it."""

    def __init__(self, text: str, *, groups: bool = True) -> None:
        """
        Raises:
            StepError: The image has no such user or group.
        """
        name, _, group = text.partition(":")
        entry = self._find("/etc/passwd", name, 2) if name else None
        if entry is None and not name.isdecimal():
            raise StepError(f"the image has no user {name!r} in /etc/passwd")
        self.user = int(entry[2]) if entry else int(name)
        self.group = int(entry[3]) if entry else 0
        self.home = entry[5] if entry and len(entry) > 5 and entry[5] else "/"
        self.name = entry[0] if entry else name
        if group:
            found = self._find("/etc/group", group, 2)
            if found is None and not group.isdecimal():
                raise StepError(f"the image has no group {group!r} in /etc/group")
            self.group = int(found[2]) if found else int(group)
        more = [] if group or not groups else self._lines("/etc/group")
        self.groups = [int(one[2]) for one in more if len(one) > 3 and self.name in one[3].split(",")]

    def _find(self, file: str, name: str, column: int) -> "list[str] | None":
        lines = [line for line in self._lines(file) if len(line) > column and line[column].isdecimal()]
        for at in (0, column):
            for line in lines:
                if line[at] == name:
                    return line
        return None

    @staticmethod
    def _lines(file: str) -> "list[list[str]]":
        try:
            with open(file, encoding="utf-8", errors="replace") as lines:
                return [line.rstrip("\n").split(":") for line in lines]
        except OSError:
            return []
