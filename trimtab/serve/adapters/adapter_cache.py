"""Which adapters does a server have in host memory and on the model?"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from weakref import WeakSet, WeakValueDictionary

import torch

from trimtab.adapter_names import is_lora_file, is_mix, parts_of, weights_of
from trimtab.adapters.file import CONFIG_NAME, TENSORS_NAME, check_beside, stamps_of
from trimtab.checkpoint.names import near_names
from trimtab.engine.lora.mixes import MOST_MIXES
from trimtab.engine.lora.store import HeldAdapter
from trimtab.engine.model import LoadedModel
from trimtab.engine.tiers.reader import PositionedFile, bytes_of
from trimtab.errors import AdapterError, CheckpointError, DoesNotFitError, RequestError
from trimtab.planning.values.byte_sizes import HELD_OBJECT_BYTES
from trimtab.serve.adapters.new_adapters import files_stamp

VERSION = "@"  # no adapter name contains it


class AdapterCache:
    """Every adapter that may be requested: all in host memory, some on the model.

    kept: names that are never removed from the model. resident_limit: how many may be on it at once, including mixes (None: as many
    as fit the plan). lost: adapters of an earlier worker whose files can no longer be read, with the reason. held: those on the
    model as they were read, by name; others of the model are read again. The least recently used one is replaced, never one that a
    row uses or that is pinned. A mix of plain LoRA is made from host memory in its own slot; with DoRA its adapters are on the
    model too. An adapter's key there is its name, with the suffix "@2" after its files were read again: rows keep the old key until
    they end.
    """

    def __init__(
        self, model: LoadedModel, *, kept: Iterable[str] = (), resident_limit: int | None = None,
        held: Mapping[str, HeldAdapter] | None = None, lost: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.model, self.kept, self._limit = model, set(kept), resident_limit
        self.host = HeldAdapters(model)
        self._held: dict[str, HeldAdapter] = {}
        self._versions: dict[str, int] = {}
        self.lost = dict(lost or {})
        # Keys on the model, each with the keys that must stay as long as it does; the least recently used comes first.
        self._resident: OrderedDict[str, tuple[str, ...]] = OrderedDict((name, ()) for name in model.adapters)
        for name in model.adapters:
            path, given = model.plan.request.adapters[name], (held or {}).get(name)
            self._held[name] = self.host.read(path) if given is None else self.host.take(path, given)
        self.swaps = self.reloads = 0
        self.swap_s: list[float] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Every known adapter, sorted."""
        return tuple(sorted(self._held))

    @property
    def held(self) -> tuple[HeldAdapter, ...]:
        """All adapters in host memory; one with several names once."""
        return tuple(dict.fromkeys(self._held.values()))

    def names_of(self, held: HeldAdapter) -> tuple[str, ...]:
        """Return the names of an adapter."""
        return tuple(name for name, other in self._held.items() if other is held)

    def is_resident(self, name: str) -> bool:
        """Whether the adapter is on the model, with its newest files."""
        return self.key(name) in self._resident

    @property
    def resident(self) -> tuple[str, ...]:
        """Adapters on the model, the least recently used first."""
        return tuple(dict.fromkeys(_name(key) for key in self._resident if not is_mix(key)))

    @property
    def mixes(self) -> tuple[str, ...]:
        """Mixes on the model, the least recently used first."""
        return tuple(dict.fromkeys(_name(key) for key in self._resident if is_mix(key)))

    def key(self, name: str | None) -> str | None:
        """Return the present key of a name on the model."""
        version = sum(self._versions.get(part, 0) for part in parts_of(name))
        return name if name is None or not version else f"{name}{VERSION}{version + 1}"

    def check(self, name: str | None) -> None:
        """Raise RequestError for an unknown adapter, a mix that needs more slots than there are or a certain order of
        its adapters; AdapterError for a lost adapter, DoesNotFitError for a mix that is larger than the whole budget."""
        for part in parts_of(name):
            if part in self.lost:
                raise AdapterError(part, [self.lost[part]], hint="Unload it, and load it again when its files are complete")
            if part not in self._held:
                known = list(self._held)
                raise RequestError(
                    "no adapter of this name is loaded", field="model", value=part, allowed=known, near=near_names(part, known)
                )
        if name is not None and is_mix(name):
            self._check_mix(name)

    def _check_mix(self, name: str) -> None:
        self.model.mixes.check_unordered({part: self._held[part] for part in parts_of(name)})
        new, kept = [key for key in self._wanted(name) if key not in self._kept_keys()], self._kept_keys()
        if self._limit is not None and len(kept) + len(new) > self._limit:
            raise RequestError(
                f"this mix needs {len(new)} adapter slots; {len(kept)} of {self._limit} are kept",
                field="model", value=name, hint="Start the server with more --resident-adapters",
            )  # fmt: skip
        hint = "Plan with a larger budget, or with fewer --keep"
        self._check_fits(f"mix {name}", sum(self._needed(key, name) for key in new), kept, hint=hint)

    def add(self, name: str, path: str | Path) -> None:
        """Read an adapter into host memory. Errors: as `check_new`, `read` and `put`."""
        self.check_new(name)
        self.put(name, self.read(path, name))

    def check_new(self, name: str) -> None:
        """Raise RequestError for a name in use."""
        if name in self._held:
            raise RequestError("an adapter of this name is loaded", field="lora_name", value=name)

    def read(self, path: str | Path, name: str) -> HeldAdapter:
        """Return an adapter in its host form; may run on another thread at the same time as the batch.

        Errors: AdapterError, also for weights that are not numbers; CheckpointError; DoesNotFitError if it exceeds the
        host's budget.
        """
        return self.host.read(path, name=name)

    def put(self, name: str, held: HeldAdapter) -> None:
        """Register an adapter. Errors: RequestError for a name in use, or if every slot is pinned; DoesNotFitError if
        it does not fit next to the pinned adapters."""
        self.check_new(name)
        kept = self._kept_keys()
        if self._limit is not None and len(kept) >= self._limit and name not in self.kept:
            raise RequestError(
                f"all {self._limit} adapter slots are kept for other adapters", field="lora_name", value=name,
                hint="Start the server with more --resident-adapters",
            )  # fmt: skip
        self._check_fits(f"adapter {name}", self.model.adapter_bytes(held), kept)
        self._held[name] = held
        self.lost.pop(name, None)

    def _check_fits(self, block: str, needed: int, kept: set[str], *, hint: str = "") -> None:
        room = self._room_beside(kept)
        if needed > room:
            raise DoesNotFitError(
                "it is larger than the memory for adapters", block=block, device=str(self.model.device), needed_bytes=needed,
                budget_bytes=room, hint=hint,
            )  # fmt: skip

    def _room_beside(self, kept: set[str]) -> int:
        """Return the bytes for adapters on the model in addition to those of these keys."""
        sizes = self.model.adapter_sizes
        return self.model.free_adapter_bytes() + sum(sizes[key] for key in self._resident if key not in kept)

    def replace(self, name: str, held: HeldAdapter, in_use: Iterable[str | None]) -> bool:
        """Use an adapter's new files from now on; return whether they differ from the old ones. Running answers keep
        the old ones. in_use: keys. Errors: DoesNotFitError, and the old ones stay."""
        if name not in self._held or held is self._held[name]:
            return False
        self._check_fits(f"adapter {name}", self.model.adapter_bytes(held), self._kept_keys() - {str(self.key(name))})
        self._held[name] = held
        self._versions[name] = self._versions.get(name, 0) + 1
        self.reloads += 1
        self._drop_old(self._used(in_use))
        return True

    def remove(self, name: str, in_use: Iterable[str | None]) -> None:
        """Unload an adapter. Errors: RequestError if it is unknown or a request needs it."""
        if self.lost.pop(name, None) is not None:
            return
        self.check(name)
        if name in set(in_use):
            raise RequestError("requests are being answered with this adapter", field="lora_name", value=name)
        for key in [key for key in self._resident if name in parts_of(_name(key))]:
            if key in self._resident:
                self._take_off(key)
        del self._held[name]
        self.kept.discard(name)

    def has_room_for(self, name: str | None, in_use: Iterable[str | None]) -> bool:
        """Whether an adapter or mix is on the model or fits without removing one in use. in_use: keys."""
        if name is None:
            return True
        wanted = self._wanted(name)
        new = [key for key in wanted if key not in self._resident]
        if not new:
            return True
        used = self._used(in_use) | set(wanted)
        is_place = self._limit is None or len(self._resident.keys() & used) + len(new) <= self._limit
        return is_place and sum(self._needed(key, name) for key in new) <= self._room_beside(used)

    def bring(self, name: str | None, in_use: Iterable[str | None]) -> str | None:
        """Load an adapter or mix onto the model, instead of the least recently used one. Returns its key. in_use: keys
        in use.

        Errors: DoesNotFitError; RequestError for a mix without a weighted sum.
        """
        if name is None:
            return None
        wanted = self._wanted(name)
        used = self._used(in_use) | set(wanted)
        self._drop_old(used)
        for key in wanted:
            if key not in self._resident:
                start = time.perf_counter()
                self._make_room(key, name, used)
                self._put_on(key, name, tuple(other for other in wanted if other != key) if is_mix(key) else ())
                self.swaps += 1
                self.swap_s = [*self.swap_s[-999:], time.perf_counter() - start]
            self._resident.move_to_end(key)
        return wanted[-1]

    # Keys -------------------------------------------------------------------------------------------------------------

    def _wanted(self, name: str) -> list[str]:
        """Return the keys that must be on the model for a name, its own last."""
        parts = parts_of(name)
        is_alone = is_mix(name) and self.model.mixes.is_plain([self._held[part] for part in parts])
        keys = [self.key(one) for one in ((name,) if is_alone else dict.fromkeys([*parts, name]))]
        return [key for key in keys if key is not None]

    def _kept_keys(self) -> set[str]:
        return {key for name in self.kept if (key := self.key(name)) is not None and key in self._resident}

    def _used(self, in_use: Iterable[str | None]) -> set[str]:
        used = {key for key in in_use if key is not None} | self._kept_keys()
        return used | {part for key in used for part in self._resident.get(key, ())}

    def _needed(self, key: str, name: str) -> int:
        """Return the bytes of one key of a name in the adapter budget."""
        if is_mix(key):
            return self.model.mixes.needed_bytes([self._held[part] for part in parts_of(name)])
        return self.model.adapter_bytes(self._held[_name(key)])

    def _drop_old(self, used: set[str]) -> None:
        """Remove unused keys with newer files or unknown names."""
        for key in [key for key in self._resident if self.key(_name(key)) != key and key not in used]:
            if key in self._resident:
                self._take_off(key)

    def _make_room(self, key: str, name: str, used: set[str]) -> None:
        def fits() -> bool:
            is_place = self._limit is None or len(self._resident) < self._limit
            mixes = tuple(other for other in self._resident if is_mix(other)) if is_mix(key) else ()
            return is_place and len(mixes) < MOST_MIXES and self._needed(key, name) <= self.model.free_adapter_bytes()

        # Mixes first: they can be made again from host memory.
        for other in sorted((other for other in self._resident if other not in used), key=lambda one: not is_mix(one)):
            if fits():
                return
            if other in self._resident:
                self._take_off(other)

    def _put_on(self, key: str, name: str, needs: tuple[str, ...]) -> None:
        if is_mix(key):
            weights: Mapping[str, float] = weights_of(name)
            parts = {str(self.key(part)): (weight, self._held[part]) for part, weight in weights.items()}
            self.model.mixes.add(key, parts)
        else:
            self.model.load_adapter(key, self._held[_name(key)])
        self._resident[key] = needs

    def _take_off(self, key: str) -> None:
        for mix in [mix for mix, needs in self._resident.items() if key in needs]:
            self._take_off(mix)
        if is_mix(key):
            self.model.mixes.remove(key)
        else:
            self.model.unload_adapter(key)
        del self._resident[key]


def _name(key: str) -> str:
    return key.partition(VERSION)[0]


# In host memory -------------------------------------------------------------------------------------------------------


# Bytes at each end of an adapter's tensors that distinguish adapters; only those with equal ends are compared in full.
END_BYTES = 2**20


class HeldAdapters:
    """Reads adapters, one at a time. An adapter is freed when its last reference ends. Methods may be called on several
    threads."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._by_files: WeakValueDictionary[Hashable, HeldAdapter] = WeakValueDictionary()
        self._by_ends: dict[str, WeakSet[HeldAdapter]] = {}
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """The host memory of all adapters."""
        adapters = {id(one): one for one in list(self._by_files.values())}
        return sum(one.host_bytes + HELD_OBJECT_BYTES for one in adapters.values())

    @property
    def room_bytes(self) -> int:
        """Return the bytes that the plan leaves for adapters beyond those in host memory."""
        return max(0, self._model.plan.held_adapters_limit_bytes - self.nbytes)

    def read(self, path: str | Path, *, name: str | None = None) -> HeldAdapter:
        """Return an adapter in its host form; an adapter or a copy that is already in memory is not stored twice.

        name: for an error; None skips the budget check, for adapters that the plan counts. Errors: DoesNotFitError
        before a tensor is read; as `LoadedModel.read_adapter`.
        """
        with self._lock:
            return self._held(path, name, None)

    def take(self, path: str | Path, held: HeldAdapter) -> HeldAdapter:
        """Return an adapter that was read from a folder, or an equal one that is already in memory. Nothing is read
        again."""
        with self._lock:
            if held.spec.file.stamps == stamps_of(path):
                return self._held(path, None, held)
            self._by_files[object()] = held  # its files have changed since: it has no stamp
            return held

    def _held(self, path: str | Path, name: str | None, given: HeldAdapter | None) -> HeldAdapter:
        files = files_stamp(path)
        known = self._by_files.get(files) if files is not None else None
        if known is not None:
            check_beside(path, name or str(path))  # several folders can have the same two adapter files
            return known
        ends = None if files is None else _ends(path)
        known = None if ends is None else next((one for one in self._by_ends.get(ends, ()) if _is_copy(path, one)), None)
        if known is not None and files is not None and files == files_stamp(path):
            check_beside(path, name or str(path))  # several folders can have the same two adapter files
            self._by_files[files] = known
            return known
        if name is not None:
            self._check_room(name, path)
        held = self._model.read_adapter(path, name=name) if given is None else given
        # Files that change during the read get no stamp.
        if files is not None and files == files_stamp(path):
            self._by_files[files] = held
            if ends is not None:
                self._by_ends = {key: alike for key, alike in self._by_ends.items() if alike}
                self._by_ends.setdefault(ends, WeakSet()).add(held)
        else:
            self._by_files[object()] = held
        return held

    def _check_room(self, name: str, path: str | Path) -> None:
        try:
            needed = os.stat(path if is_lora_file(path) else Path(path) / TENSORS_NAME).st_size + HELD_OBJECT_BYTES
        except OSError:
            return  # reading reports the problem
        if needed > self.room_bytes:
            limit = self._model.plan.held_adapters_limit_bytes
            raise DoesNotFitError(
                f"the plan leaves {limit} B of host memory for adapters, those that are loaded take {self.nbytes} B",
                block=f"adapter {name}", device="host", needed_bytes=needed, budget_bytes=self.room_bytes,
                hint="Unload adapters that are not needed",
            )  # fmt: skip


def _ends(path: str | Path) -> str | None:
    """Return a hash of an adapter's configuration, tensor names, sizes and the ends of its values; None if the files
    cannot be read."""
    whole = hashlib.sha256()
    try:
        whole.update(hashlib.sha256((Path(path) / CONFIG_NAME).read_bytes()).digest())
        with open(Path(path) / TENSORS_NAME, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            whole.update(str(size).encode() + head + file.read(min(int.from_bytes(head, "little"), size) + END_BYTES))
            file.seek(max(file.tell(), size - END_BYTES))
            whole.update(file.read())
    except OSError:
        return None
    return whole.hexdigest()


def _is_copy(path: str | Path, held: HeldAdapter) -> bool:
    """Whether a folder with the same ends as an adapter in memory has all of its values."""
    try:
        with closing(PositionedFile(Path(path) / TENSORS_NAME)) as file:
            for (_, start), tensor in held.tensors.items():
                values = torch.empty(tensor.nbytes, dtype=torch.uint8)
                file.read_into(bytes_of(values), start)
                if not torch.equal(values, tensor.contiguous().reshape(-1).view(torch.uint8)):
                    return False
    except CheckpointError:
        return False
    return True
