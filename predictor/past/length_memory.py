r"""What the traffic's own past says of the next length: a bounded memory without a model.

Keys form a chain from the general to the particular: the model, its client, the template, each
longer prefix of the prompt, the prompt. Every key has the decayed count n of the requests that
went through it, the mean :math:`\bar y` of their log lengths, and the mean :math:`\bar e` of the
squared errors of what was forecast of them. Down the chain each is shrunk to what lies above:

.. math:: \mu = \frac{n \bar y + k \mu'}{n + k}, \qquad
          \sigma^2 = \frac{n \bar e + k \sigma'^2}{n + k}, \qquad k = 2.

Errors are those of forecasts, not distances from a mean, and what the same requests tell counts
once: one request under twenty keys of its own would seem to be certain otherwise.

A client's keys are mixed with the client's own: no other client's lengths are below them. A model's
estimate is over its clients' means, each with a weight n / (n + k) of at most 1, however many
requests it sends. So whoever lies about lengths moves what is forecast of others by one share.
"""

import secrets
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
from math import log, sqrt
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from data_collection.files import replace_file
from predictor.compilation import compiled_core, compiled_inline
from predictor.past.log_normal import LONGEST, LogNormal

KeyArray = npt.NDArray[np.uint64]

SHRINKAGE = 2.0
"""k: requests like those above that each key begins with."""
_MOST_SHARE = 0.5
"""Of the past of a client of which much is known, beside what a prompt lets expect."""
DECAY = 0.97
"""Of a count with each request: about the last 33 count."""
WAYS = 16
"""Entries in a set: a key can be in one of so many places."""
MOST_CHAIN = 64
"""Keys of a request that are kept: of a longer chain the first 16 and the last 48."""
MOST_CLIENTS = 4_096
MOST_KEYS = 1 << 24
_SETS_AT_ONCE = 1 << 13
"""Sets of the table, 4 MiB, that are copied at a time."""
_FIRST = 16
_NEW = np.uint64(0xD1B54A32D192ED03)
"""In the key of requests that are new below another one."""
_PRIOR = LogNormal(log(256.0), 1.2)
"""Of a model of which nothing is known."""
_LEAST_SPREAD, _MOST_SPREAD = 0.05, 1.2
"""Answers have many lengths near 0 and few beyond twice the usual: a wider law's mean is too long,
the more so for whoever has surprised, who would wait behind all others for being short."""
_MOST_ERROR = log(LONGEST) ** 2

ENTRY = np.dtype(
    [
        ("key", np.uint64),  # 0: the place is free
        ("owner", np.uint32),  # digest of the client
        ("used", np.uint32),  # number of the request that used it last
        ("count", np.float32),
        ("mean", np.float32),
        ("error", np.float32),
    ],
    align=True,
)


@compiled_inline
def _mixed(key: np.uint64, other: np.uint64) -> np.uint64:
    """Return a key of two, never 0, by which nobody tells either."""
    x = (key + np.uint64(0x9E3779B97F4A7C15)) ^ (other * np.uint64(0xFF51AFD7ED558CCD))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return x if x != np.uint64(0) else np.uint64(1)


@compiled_inline
def _place(table: npt.NDArray[Any], key: np.uint64) -> int:
    """Return where in its set a key is; -1 if it is not known."""
    row = table[int(key & np.uint64(len(table) - 1))]
    for way in range(WAYS):
        if row[way].key == key:
            return way
    return -1


@compiled_core
def walk(
    table: npt.NDArray[Any],
    client: np.uint64,
    chain: KeyArray,
    trail: KeyArray,
    state: npt.NDArray[np.float64],
) -> int:
    """Go down a chain [n]; write the keys of the client's own to ``trail`` [n + 1].

    The last of these stands for requests that are new below the deepest known key. ``state`` [2]
    has the mean and the variance above, and gets those of the chain.

    Returns:
        The number of the deepest known key, from 1; 0 if none is known.
    """
    known, last, told, count = 0, len(chain), -1.0, -1.0
    for i in range(last + 1):
        if i < last:
            trail[i] = _mixed(chain[i], client)
        else:
            below = client if known == 0 else trail[known - 1]
            trail[last] = _mixed(_NEW + np.uint64(known < last), below)
        way = _place(table, trail[i])
        if way >= 0:
            entry = table[int(trail[i] & np.uint64(len(table) - 1))][way]
            n = np.float64(entry.count)
            state[0] = (n * entry.mean + SHRINKAGE * state[0]) / (n + SHRINKAGE)
            if entry.error != told or entry.count != count:
                state[1] = (n * entry.error + SHRINKAGE * state[1]) / (n + SHRINKAGE)
                told, count = entry.error, entry.count
            if i < last:
                known = i + 1
    return known


@compiled_inline
def _victim(row: npt.NDArray[Any], owner: np.uint32) -> int:
    """Return which entry of a full set makes room for a new one of an owner.

    The least recently used of whoever has most there, with the new one: so no client loses an entry
    to one that has more.
    """
    victim, most = 0, -1
    for way in range(WAYS):
        own = 1 if row[way].owner == owner else 0
        for other in range(WAYS):
            own += row[other].owner == row[way].owner
        if own > most or (own == most and row[way].used < row[victim].used):
            victim, most = way, own
    return victim


@compiled_core
def note(
    table: npt.NDArray[Any],
    owner: np.uint32,
    trail: KeyArray,
    value: float,
    error: float,
    number: int,
) -> int:
    """Learn the log length of a request, and its squared error, at each of its keys.

    Returns:
        How many more keys are known.
    """
    added = 0
    for i in range(len(trail)):
        key = trail[i]
        row = table[int(key & np.uint64(len(table) - 1))]
        way = _place(table, key)
        if way < 0:
            way = 0
            while way < WAYS and row[way].key != np.uint64(0):
                way += 1
            if way == WAYS:
                way = _victim(row, owner)
            else:
                added += 1
            row[way].key = key
            row[way].owner = owner
            row[way].count = 0.0
            row[way].mean = 0.0
            row[way].error = 0.0
        entry = row[way]
        entry.count = DECAY * entry.count + 1.0
        entry.mean += (value - entry.mean) / entry.count
        entry.error += (error - entry.error) / entry.count
        entry.used = np.uint32(number)
    return added


class PastError(ValueError):
    """A file that does not hold a memory of lengths."""


def kept_chain(chain: KeyArray) -> KeyArray:
    """Return the keys of a chain that are kept."""
    if len(chain) <= MOST_CHAIN:
        return chain
    return np.concatenate([chain[:_FIRST], chain[_FIRST - MOST_CHAIN :]])


class Recalled(NamedTuple):
    """What is recalled for a request, and what it teaches when it ends.

    Attributes:
        length: forecast of its output tokens.
        known: keys of its chain down to the deepest known one; 0 if none is known.
        requests: decayed number of its client's earlier ones; 0: the model alone is known.
        model: that it is for.
        client: that it is from, with this model.
        owner: of its keys: the client, whichever model it asks for.
        trail: [n + 1] its keys, of the client's own.
    """

    length: LogNormal
    known: int
    requests: float
    model: int
    client: int
    owner: int
    trail: KeyArray

    def expected(self, most: float, by_prompt: float | None = None) -> float:
        r"""Return the tokens that an answer is expected to have, by the past or by its prompt too.

        .. math:: \hat p^{\,1-a}\, \hat m^{\,a}, \qquad a = \frac{1}{2} \frac{n}{n + k}

        with p̂ by the prompt alone, m̂ by the past, and n earlier requests of its client.

        Args:
            most: that it may have.
            by_prompt: p̂, by a predictor of prompts; None: there is none.
        """
        tokens = self.length.expected(most)
        if by_prompt is None:
            return tokens
        share = _MOST_SHARE * self.requests / (self.requests + SHRINKAGE)
        return float(max(by_prompt, 1.0) ** (1 - share) * tokens**share)

    def beside(self, running: int, ended: int) -> "Recalled":
        """Return what is recalled where another request with the same prompt runs.

        It counts like one that has ended, with the length that is expected beyond its tokens.

        Args:
            running: tokens that it has, at least 1; of several, the most.
            ended: requests with that prompt that have ended meanwhile.
        """
        beyond, _ = self.length.beyond(float(min(running, LONGEST)))
        n = SHRINKAGE + ended
        mean = (n * self.length.mean + beyond) / (n + 1)
        return self._replace(length=self.length._replace(mean=mean))


class _Client(msgspec.Struct, array_like=True):
    model: int
    count: float = 0.0
    mean: float = 0.0
    error: float = 0.0

    @property
    def weight(self) -> float:
        return self.count / (self.count + SHRINKAGE)


class _Model(msgspec.Struct, array_like=True):
    """Sums over clients: of their weights, and of their means and errors by these."""

    weight: float = 0.0
    mean: float = 0.0
    error: float = 0.0


Finite = Annotated[float, msgspec.Meta(ge=0.0, le=_MOST_ERROR)]
Key = Annotated[int, msgspec.Meta(ge=0)]


class _KeptClient(msgspec.Struct, array_like=True, frozen=True):
    key: Key
    model: Key
    count: Annotated[float, msgspec.Meta(gt=0.0, le=1 / (1 - DECAY) + 1)]
    mean: Finite
    error: Finite


class _Kept(msgspec.Struct, forbid_unknown_fields=True):
    """A memory as a file has it."""

    version: Annotated[int, msgspec.Meta(ge=1, le=1)]
    salt: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    number: Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]
    clients: Annotated[list[_KeptClient], msgspec.Meta(max_length=MOST_CLIENTS)]
    entries: bytes


def compile_memory() -> None:
    """Recall and learn once, so that no request waits for a compiler."""
    memory = LengthMemory(0)
    memory.learn(memory.recall(1, 1, np.ones(1, dtype=np.uint64)), 1)


class LengthMemory:
    """Forecasts lengths by those of earlier requests, in a fixed amount of memory.

    The table has 32 bytes a key. When a set of it is full, the least recently used entry goes of
    the client that has most there.

    Args:
        keys: most that are known, at least 16; the next power of two is taken.
        salt: 32 bytes by which callers make keys of texts; random when None.

    Attributes:
        salt: likewise.
        known: keys that are known.
    """

    def __init__(self, keys: int = 1 << 20, salt: bytes | None = None) -> None:
        self.salt = salt or secrets.token_bytes(32)
        sets = 1 << max(0, (max(keys, WAYS) - 1).bit_length() - 4)
        self._table = np.empty((sets, WAYS), dtype=ENTRY)
        self._table.fill(0)  # np.zeros leaves it to the first requests: up to 60 ms in huge pages
        self.known = 0
        self._number = 0
        self._clients: OrderedDict[int, _Client] = OrderedDict()
        self._models: dict[int, _Model] = {}
        self._state = np.zeros(2)

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return int(self._table.nbytes)

    def key_of(self, name: str) -> int:
        """Return the key of a model, or of a client, by its name."""
        raw = name.encode(errors="surrogatepass")
        return int.from_bytes(blake2b(raw, key=self.salt, digest_size=8).digest(), "little")

    def recall(self, model: int, client: int, chain: KeyArray) -> Recalled:
        """Return what is known of a request that has arrived.

        Args:
            model: key of the model.
            client: key of the client; that of the same client with another model is another one.
            chain: [n] keys of the request from the general to the particular, each of which stands
                for all before it.
        """
        chain = kept_chain(chain)
        if not chain.flags.writeable:
            chain = chain.copy()  # else `walk` is compiled once more, as a request comes
        owner = client & 0xFFFFFFFF
        client = (client ^ (model * 0x9E3779B97F4A7C15)) & 0xFFFFFFFFFFFFFFFF
        of_all, own = self._models.get(model, _Model()), self._clients.get(client)
        prior, n, k = _PRIOR, 0.0 if own is None else own.count, SHRINKAGE
        mean = (of_all.mean + k * prior.mean) / (of_all.weight + k)
        variance = (of_all.error + k * prior.spread**2) / (of_all.weight + k)
        if own is not None:
            mean = (n * own.mean + k * mean) / (n + k)
            variance = (n * own.error + k * variance) / (n + k)
        state, trail = self._state, np.empty(len(chain) + 1, dtype=np.uint64)
        state[0], state[1] = mean, variance
        known = walk(self._table, np.uint64(client), chain, trail, state)
        mean, spread = float(state[0]), sqrt(max(float(state[1]), 0.0))
        length = LogNormal(mean, min(max(spread, _LEAST_SPREAD), _MOST_SPREAD))
        return Recalled(length, known, n, model, client, owner, trail)

    def learn(self, recalled: Recalled, tokens: int, cut: bool = False) -> None:
        """Learn how long the answer to a request was that has ended.

        Args:
            recalled: for it, as it arrived.
            tokens: that it generated, at least 1.
            cut: its ``max_tokens`` ended it: it tells that it would be longer, and counts as what
                is then expected of it.
        """
        value = log(min(max(tokens, 1), LONGEST))
        error = (value - recalled.length.mean) ** 2
        if cut:
            value, error = recalled.length.beyond(float(min(tokens, LONGEST)))
        value, error = min(value, log(LONGEST)), min(error, _MOST_ERROR)
        self._learn_of_client(recalled, value, error)
        self._number = (self._number + 1) & 0xFFFFFFFF
        owner = np.uint32(recalled.owner)
        self.known += note(self._table, owner, recalled.trail, value, error, self._number)

    def _learn_of_client(self, recalled: Recalled, value: float, error: float) -> None:
        own = self._clients.get(recalled.client)
        if own is None:
            own = self._clients[recalled.client] = _Client(recalled.model)
            if len(self._clients) > MOST_CLIENTS:
                _, oldest = self._clients.popitem(last=False)
                self._count(oldest, -1.0)
        else:
            self._clients.move_to_end(recalled.client)
            self._count(own, -1.0)
        own.count = DECAY * own.count + 1.0
        own.mean += (value - own.mean) / own.count
        own.error += (error - own.error) / own.count
        self._count(own, 1.0)

    def _count(self, client: _Client, sign: float) -> None:
        """Add a client to the sums of its model, or take it away; a model of none is forgotten."""
        of_all = self._models.setdefault(client.model, _Model())
        weight = sign * client.weight
        of_all.weight += weight
        of_all.mean += weight * client.mean
        of_all.error += weight * client.error
        if of_all.weight < 1e-6:
            del self._models[client.model]

    def copied(self) -> Iterator["LengthMemory"]:
        """Yield a copy that another thread may save, again and again until it is whole.

        Each time a few megabytes more are copied: what holds an event loop may go on in between.
        """
        other = LengthMemory(WAYS, self.salt)
        other._number = self._number
        other._clients = OrderedDict(
            (key, msgspec.structs.replace(client)) for key, client in self._clients.items()
        )
        # As bytes: NumPy copies structures field by field.
        table = np.empty_like(self._table)
        ours, theirs = self._table.view(np.uint8), table.view(np.uint8)
        for begin in range(0, len(ours), _SETS_AT_ONCE):
            theirs[begin : begin + _SETS_AT_ONCE] = ours[begin : begin + _SETS_AT_ONCE]
            yield other
        other._table = table
        yield other

    def _entries(self) -> bytes:
        """Return the entries of the table that are known."""
        parts = []
        for begin in range(0, len(self._table), _SETS_AT_ONCE):
            part = self._table[begin : begin + _SETS_AT_ONCE]
            rows = part.view(np.uint8).reshape(-1, ENTRY.itemsize)
            parts.append(rows[part["key"].reshape(-1) != 0].tobytes())
        return b"".join(parts)

    def save(self, path: Path) -> None:
        """Write it to a file that only this user can read, in place of an older one as a whole.

        Raises:
            OSError: the file cannot be written.
        """
        kept = _Kept(
            version=1,
            salt=self.salt,
            number=self._number,
            clients=[
                _KeptClient(key, own.model, own.count, own.mean, own.error)
                for key, own in self._clients.items()
            ],
            entries=self._entries(),
        )
        with replace_file(path) as temporary:
            temporary.touch(0o600)
            temporary.chmod(0o600)
            temporary.write_bytes(msgspec.msgpack.encode(kept))

    @classmethod
    def load(cls, path: Path, keys: int = 1 << 20) -> "LengthMemory":
        """Return the memory in a file, as many of its keys as there is room for.

        Raises:
            OSError: the file cannot be read.
            PastError: it does not hold a memory of lengths, or is too large for so many keys.
        """
        most = max(keys, MOST_KEYS) * ENTRY.itemsize + (1 << 20)
        if not path.is_file():
            raise PastError(f"{path}: not a regular file")
        if path.stat().st_size > most:
            raise PastError(f"{path}: larger than {most} bytes: no memory of lengths")
        try:
            kept = msgspec.msgpack.decode(path.read_bytes(), type=_Kept)
            entries = np.frombuffer(kept.entries, dtype=ENTRY)
        except (msgspec.DecodeError, ValueError) as error:
            raise PastError(f"{path}: no memory of lengths: {error}") from error
        figures = np.stack([entries[name] for name in ("count", "mean", "error")])
        if not (np.isfinite(figures).all() and (figures >= 0).all() and (entries["key"] > 0).all()):
            raise PastError(f"{path}: a count, mean or error is none")
        if (figures > [[1 / (1 - DECAY) + 1], [log(LONGEST) + 1], [_MOST_ERROR + 1]]).any():
            raise PastError(f"{path}: a count, mean or error is larger than any can be")
        memory = cls(keys, kept.salt)
        memory._number = kept.number
        memory._put(entries)
        for one in {one.key: one for one in kept.clients}.values():
            own = memory._clients[one.key] = _Client(one.model, one.count, one.mean, one.error)
            memory._count(own, 1.0)
        return memory

    def _put(self, entries: npt.NDArray[Any]) -> None:
        """Put entries into the table, the latest used first; what has no place is left out."""
        entries = entries[np.argsort(entries["used"], kind="stable")[::-1]]
        entries = entries[np.unique(entries["key"], return_index=True)[1]]
        sets = (entries["key"] & np.uint64(len(self._table) - 1)).astype(np.int64)
        order = np.lexsort((-entries["used"].astype(np.int64), sets))
        entries, sets = entries[order], sets[order]
        way = np.arange(len(sets)) - np.searchsorted(sets, sets)
        fits = way < WAYS
        self._table[sets[fits], way[fits]] = entries[fits]
        self.known = int(fits.sum())
