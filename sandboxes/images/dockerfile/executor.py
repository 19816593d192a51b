"""Carry out a plan: make layers of the files that its stages change, and pack the image.

What a handler reads is in its layer's key, by which `layer_builder.py` finds a layer that is there.
"""

import json
import posixpath
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sandboxes.images import squashfs
from sandboxes.images.dockerfile.context import BuildContext, ContextFile, digest, send, send_tree
from sandboxes.images.dockerfile.layer_builder import BuildOptions, LayerBuilder, add_settings, pack
from sandboxes.images.dockerfile.layers import LayerStore, make_key
from sandboxes.images.dockerfile.namespace import Line, StepJob, StepMount, StepResult
from sandboxes.images.dockerfile.parser import HEREDOC, Instruction, StageState
from sandboxes.images.dockerfile.plan import (
    ADDRESS,
    PREDEFINED,
    SCRATCH,
    BuildPlan,
    BuildStage,
    copied_words,
    parse_mount,
    platform_arguments,
)
from sandboxes.images.dockerfile.words import Expander, split_words
from sandboxes.images.facts import PATH, read_environment, read_labels
from sandboxes.images.tree import ImageTree

KEPT_AS_LABELS = ("EXPOSE", "HEALTHCHECK", "STOPSIGNAL", "VOLUME")


class PlanExecutor:
    """One build. It blocks: call it in a thread."""

    def __init__(
        self,
        plan: BuildPlan,
        context: BuildContext,
        bases: Mapping[str, Path],
        layers: LayerStore,
        apptainer: Path,
        say: Line,
        options: BuildOptions,
    ) -> None:
        self._plan = plan
        self._context = context
        self._bases = bases
        self._apptainer = apptainer
        self._builder = LayerBuilder(plan.parsed.file, layers, say, options)
        self._expander = Expander(plan.parsed.escape)
        self._states: dict[str, StageState] = {}
        self._handlers: Mapping[str, Callable[[StageState, Instruction], None]] = {
            "RUN": self._run,
            "COPY": self._copy,
            "ADD": self._copy,
            "WORKDIR": self._workdir,
            "ARG": self._arg,
            "ENV": self._env,
            "USER": self._user,
            "SHELL": self._shell,
            "LABEL": self._label,
            "MAINTAINER": self._maintainer,
            "ENTRYPOINT": self._start_command,
            "CMD": self._start_command,
        } | dict.fromkeys(KEPT_AS_LABELS, self._keep_as_label)
        """They raise ValueError for text without meaning."""

    def build(self, target: Path) -> None:
        """
        Raises:
            DockerfileError: An instruction means nothing with the values that its variables have.
            ImageBuildError: A step failed, or the image is too large.
            ImageError: A base, or a file of the context, cannot be read.
        """
        for stage in self._plan.stages:
            self._states[stage.name] = self._build_stage(stage)
        state, origin = self._states[self._plan.target.name], self._plan.target.origin
        add_settings(self._builder, state, origin)
        pack(self._builder, self._apptainer, state, origin, target)

    def _build_stage(self, stage: BuildStage) -> StageState:
        state = self._begin(stage)
        for one in stage.instructions:
            try:
                self._handlers[one.keyword](state, one)
            except ValueError as error:
                raise self._plan.parsed.error(one.line, str(error)) from error
        return state

    def _begin(self, stage: BuildStage) -> StageState:
        self._builder.say(f"{self._builder.where(stage.origin)}: {stage.origin}")
        if stage.base in self._states:
            state = replace(self._states[stage.base])
            state.env, state.labels, state.args = dict(state.env), dict(state.labels), {}
            return state
        return self._base_state(stage.base, stage.origin)

    def _base_state(self, base: str, origin: Instruction) -> StageState:
        if base == SCRATCH:
            return StageState(make_key(SCRATCH, self._builder.options.fresh), env={"PATH": PATH})
        return base_state(self._builder, self._apptainer, self._bases[base], origin)

    def _workdir(self, state: StageState, one: Instruction) -> None:
        state.workdir = posixpath.normpath(posixpath.join(state.workdir, self._expand(state, one.text)))
        job = StepJob("folder", state.files, dest=state.workdir)
        self._builder.do(state, one, make_key(state.key, "WORKDIR", state.workdir), job)

    def _run(self, state: StageState, one: Instruction) -> None:
        argv, scripts = self._command(state, one)
        seen = {"PATH": PATH} | state.args | state.env
        passed = {name: value for name, value in self._plan.given.items() if name in PREDEFINED}
        network = self._builder.options.network if one.flag("network") in {None, "default"} else one.flag("network")
        mounts, mounted = self._mounts(state, one)
        parts = (argv, scripts, state.user, state.workdir, seen, network, mounted)
        job = StepJob(
            "run",
            state.files,
            argv=argv,
            env=passed | seen,
            scripts=scripts,
            user=state.user,
            cwd=state.workdir,
            mounts=mounts,
            network="none" if network == "none" else "host",
        )
        self._builder.do(state, one, make_key(state.key, "RUN", *parts), job)

    def _command(self, state: StageState, one: Instruction) -> tuple[list[str], dict[str, str]]:
        if one.array is not None:
            return list(one.array), {}
        if not one.heredocs:
            return [*state.shell, one.text], {}
        if HEREDOC.fullmatch(one.text.strip()) is None:  # the shell reads them itself
            texts = "".join(f"{heredoc.text}{heredoc.name}\n" for heredoc in one.heredocs)
            return [*state.shell, f"{one.text.replace('<<-', '<<')}\n{texts}"], {}
        (heredoc,) = one.heredocs
        if heredoc.text.startswith("#!"):
            if "/" in heredoc.name:  # it would be a path of the host
                raise ValueError(f"the here-document {heredoc.name} is a program, whose name cannot have a slash")
            return [f"/dev/pipes/{heredoc.name}"], {heredoc.name: heredoc.text}
        return [*state.shell, heredoc.text], {}

    def _mounts(self, state: StageState, one: Instruction) -> tuple[list[StepMount], list[object]]:
        """Return the mounts, and their part of the layer's key."""
        mounts: list[StepMount] = []
        seen: list[object] = []
        for name, value in one.flags:
            if name != "mount":
                continue
            asked = parse_mount(self._expand(state, value))
            seen.append([asked.kind, asked.target, asked.source])
            if asked.kind == "cache":
                mounts.append(StepMount("cache", asked.target, path=self._builder.layers.cache(asked.source)))
            elif asked.kind == "tmpfs":
                mounts.append(StepMount("tmpfs", asked.target))
            else:
                source = self._mounted(asked.stage, asked.source, one)
                seen.append(source.key)
                at = f"/{posixpath.normpath('/' + asked.source).lstrip('/')}"
                mounts.append(StepMount("bind", asked.target, at, source.files))
        return mounts, seen

    def _mounted(self, stage: str | None, path: str, one: Instruction) -> StageState:
        if stage is not None:
            return self._other(stage, one)
        state = StageState(make_key("context"))
        parent = posixpath.dirname(posixpath.normpath(f"/{path}"))
        files = self._context.select([path])
        folder = any(file.name == "d" for file in files)
        dest = posixpath.normpath(f"/{path}") if folder else f"{parent.rstrip('/')}/"
        self._builder.write(state, one, StepJob("write", dest=dest), digest(files), lambda pipe: send(files, pipe))
        return state

    def _other(self, name: str, one: Instruction) -> StageState:
        numbers = {str(stage.index): stage.name for stage in self._plan.stages}
        if (found := self._states.get(numbers.get(name, name.lower()))) is not None:
            return found
        if name not in self._states:
            self._states[name] = self._base_state(name, one)
        return self._states[name]

    def _copy(self, state: StageState, one: Instruction) -> None:
        *sources, dest = (self._expand(state, word) for word in self._copied(one))
        if one.keyword == "ADD" and (address := next(filter(ADDRESS.search, sources), None)) is not None:
            raise ValueError(f"ADD of the address {address} cannot be had")
        inline = [self._inline(state, heredoc.name, one) for heredoc in one.heredocs]
        plain = sources[: len(sources) - len(inline)] if inline else sources
        many = len(sources) > 1 or any(sign in source for source in sources for sign in "*?[")
        owner, mode = (self._expand(state, one.flag(flag) or "") for flag in ("chown", "chmod"))
        job = StepJob("write", state.files, dest=dest, cwd=state.workdir, owner=owner, mode=mode, many=many)
        if (source := one.flag("from")) is not None:
            other = self._other(source, one)
            reading = StepJob("read", other.files, sources=plain)
            self._builder.write(state, one, job, f"{other.key} {json.dumps(plain)}", reading)
            return
        files = [*self._context.select(plain, unpack=one.keyword == "ADD"), *inline]
        self._builder.write(state, one, job, digest(files), lambda pipe: send(files, pipe))

    def _copied(self, one: Instruction) -> list[str]:
        """Return the words, with the names of here-documents last but one."""
        words = copied_words(one, self._plan.parsed.escape)
        if not one.heredocs:
            return words
        named = [word for word in words[:-1] if HEREDOC.fullmatch(word)]
        return [*(word for word in words[:-1] if word not in named), *named, words[-1]]

    def _inline(self, state: StageState, name: str, one: Instruction) -> ContextFile:
        heredoc = next(found for found in one.heredocs if found.name == name)
        text = heredoc.text
        if heredoc.expands:
            text = self._expander.expand(text, state.args | state.env, quotes=False)
        return ContextFile(f"f/{name}", None, text.encode(errors="surrogateescape"))

    def _expand(self, state: StageState, text: str) -> str:
        return self._expander.expand(text, state.args | state.env)

    def _arg(self, state: StageState, one: Instruction) -> None:
        for word in split_words(one.text, self._plan.parsed.escape):
            name, equals, default = word.partition("=")
            known = platform_arguments() | dict(self._plan.arguments)
            value = self._plan.given.get(name, self._expand(state, default) if equals else known.get(name))
            if value is not None:
                state.args[name] = value

    def _env(self, state: StageState, one: Instruction) -> None:
        state.env |= self._pairs(state, one)

    def _label(self, state: StageState, one: Instruction) -> None:
        state.labels |= self._pairs(state, one)

    def _pairs(self, state: StageState, one: Instruction) -> dict[str, str]:
        words = split_words(one.text, self._plan.parsed.escape)
        if "=" not in words[0]:  # the old form: one name, and the rest of the line
            name, value = one.text.split(maxsplit=1)
            return {self._expand(state, name): self._expand(state, value)}
        pairs = (word.partition("=") for word in words)
        return {self._expand(state, name): self._expand(state, value) for name, _, value in pairs}

    def _maintainer(self, state: StageState, one: Instruction) -> None:
        state.labels["maintainer"] = one.text

    def _keep_as_label(self, state: StageState, one: Instruction) -> None:
        flags = "".join(f"--{name}={value} " for name, value in one.flags)
        text = flags + (one.text if one.keyword == "HEALTHCHECK" else self._expand(state, one.text))
        state.labels[f"docker.{one.keyword.lower()}"] = text if one.array is None else one.text

    def _user(self, state: StageState, one: Instruction) -> None:
        state.user = self._expand(state, one.text)

    def _shell(self, state: StageState, one: Instruction) -> None:
        state.shell = one.array or ()

    def _start_command(self, state: StageState, one: Instruction) -> None:
        words = one.array if one.array is not None else (*state.shell, one.text)
        if one.keyword == "ENTRYPOINT":
            state.entrypoint, state.command = words, ()
        else:
            state.command = words


UNPACK = ("-quiet", "-no-progress", "-no-xattrs", "-no-exit-code", "-force")


def base_state(builder: LayerBuilder, apptainer: Path, base: Path, origin: Instruction) -> StageState:
    """Return the state of a stage that has only a base, an image file or folder; the files become a layer.

    Raises:
        ImageBuildError: The base cannot be unpacked, or is too large.
        ImageError: The base cannot be read.
    """
    path = base.resolve()
    found = path.stat()
    owners, fresh = builder.namespace.keeps_owners, builder.options.fresh
    key = make_key("base", str(path), found.st_size, found.st_mtime_ns, owners, fresh)
    state = StageState(key)
    builder.add(state, origin, key, lambda changes: _unpack(builder, apptainer, path, changes, origin))
    tree = ImageTree(state.files[0])
    descriptor = squashfs.read_descriptor(apptainer, path) if path.is_file() else {}
    state.declared = {"PATH": PATH} | read_environment(tree)
    state.env, state.labels = dict(state.declared), read_labels(tree)
    state.workdir = descriptor.get("WorkingDir") or state.labels.get("docker.workdir") or "/"
    state.user = descriptor.get("User") or state.labels.get("docker.user") or ""
    state.entrypoint = _strings(descriptor.get("Entrypoint") or state.labels.get("docker.entrypoint"))
    state.command = _strings(descriptor.get("Cmd") or state.labels.get("docker.cmd"))
    return state


def _unpack(builder: LayerBuilder, apptainer: Path, image: Path, changes: Path, origin: Instruction) -> StepResult:
    if image.is_dir():
        job = StepJob("write", changes=changes, dest="/", many=True)
        return builder.namespace.run(job, builder.say, data=lambda pipe: send_tree(image, pipe))
    where = squashfs.offset(apptainer, image)
    argv = ["unsquashfs", *UNPACK, "-offset", where, "-dest", "/tmp/out", "/tmp/in0"]  # noqa: S108  see step/overlay.py
    # It complains of devices, which nobody can make here, and which every sandbox has of its own.
    job = StepJob("tool", output=changes / "fs", inputs=[image], argv=argv)
    result = builder.namespace.run(job)
    if not any((changes / "fs").iterdir()):
        raise builder.failed(origin, replace(result, exit_code=result.exit_code or 1))
    return replace(result, exit_code=0)


def _strings(value: Any) -> tuple[str, ...]:
    """Read a list from a descriptor, or from a label, where it is JSON."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return ()
    return tuple(map(str, found)) if isinstance(found, list) else ()
