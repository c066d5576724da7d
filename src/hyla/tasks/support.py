"""Which combinations of modules a task trains on and which it holds out (P2).

A task combines 1 to K of M modules. Every such combination is either trained on or held out. Two properties of the trained
ones decide whether a learner can be expected to generalise: they are *compositional* if every module occurs in one, and
*connected* if moreover the graph whose nodes are the modules, with an edge where two of them occur together, is connected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from math import comb
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int16
from torch import Tensor

from hyla.errors import check
from hyla.tasks.base import Draws, entropy

SupportName = Literal[
    "random",
    "equal",
    "connected",
    "disconnected",
    "pseudo_random_disconnected",
    "non_compositional",
    "popular_modules",
    "minimal_first",
    "unpopular_modules",
    "random_constant",
    "random_linear",
    "random_quadratic",
    "random_linear_pure",
    "random_linear_modules",
    "random_linear_modules_hot",
    "random_quadratic_modules",
    "random_quadratic_modules_hot",
]

MAX_COMBINATIONS = 5_000_000  # listed as 16-bit integers; the intermediate results take some twenty times that

MAX_TRIES = 200  # random draws that may miss the wanted property before it is built in

Rows = Int16[np.ndarray, "combinations hot"]
Chosen = Bool[np.ndarray, "combinations"]


@dataclass(frozen=True, eq=False)
class Support:
    """Combinations of up to `num_hot` (K) of `num_modules` (M) modules: those trained on and those held out.

    train, held_out: `[C, K]`, one row of ascending modules per combination, filled up with -1. Both are in random order,
    so that their first rows are a random part of them.
    """

    name: SupportName
    num_modules: int
    num_hot: int
    train: Int16[Tensor, "train hot"]
    held_out: Int16[Tensor, "held_out hot"]
    _sized: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict, repr=False)

    @property
    def held_out_sizes(self) -> tuple[int, ...]:
        """The numbers of active modules for which there are combinations never trained on."""
        counts = torch.bincount((self.held_out >= 0).sum(-1), minlength=self.num_hot + 1).tolist()
        small = [size for size, count in enumerate(counts) if count]
        return (*small, *range(self.num_hot + 1, self.num_modules + 1))

    def held_out_with(self, num_active: int) -> Int16[Tensor, "combinations hot"]:
        """The held-out combinations of exactly `num_active` <= K modules, in the order of `held_out`."""
        self._check_active(num_active)
        allowed = f"above num_hot = {self.num_hot} all combinations are held out; draw_held_out draws from them"
        check(num_active <= self.num_hot, "num_active", num_active, allowed)
        return self.held_out[(self.held_out >= 0).sum(-1) == num_active]

    def draw_held_out(self, draws: Draws, batch_size: int, num_active: int) -> Int[Tensor, "batch active"]:
        """Random combinations `[B, num_active]` of exactly so many modules, on the device of `draws`.

        Up to K modules: uniformly from the held-out ones. Above, up to M: any so many modules, since no combination of
        that size is trained on. Raises `ConfigError` with the possible sizes where there is none.
        """
        if num_active > self.num_hot:
            self._check_active(num_active)
            return draws.permutations(self.num_modules, batch_size)[:, :num_active].sort(-1).values
        key = (num_active, draws.device)
        if key not in self._sized:
            self._sized[key] = self.held_out_with(num_active)[:, :num_active].long().to(draws.device)
        rows_CA = self._sized[key]
        return rows_CA[draws.integers(len(rows_CA), batch_size)]

    def _check_active(self, num_active: int) -> None:
        sizes = self.held_out_sizes
        text = ", ".join(map(str, sizes)) or "none"
        allowed = f"support {self.name!r} with num_hot = {self.num_hot} holds out combinations of {text} modules"
        check(num_active in sizes, "num_active", num_active, allowed)


def make_support(
    name: SupportName, num_modules: int, num_hot: int, held_out_fraction: float = 0.25, seed: int = 0
) -> Support:
    """The support called `name`, decided on the CPU by the arguments alone.

    Of T combinations, `held_out_fraction` of them held out (rounded as the paper's code does):

    - `random`: uniform among the compositional and connected ones.
    - `equal`: modules occur equally often, within 1 of each other; compositional and connected.
    - `popular_modules`: all that touch one of the first n modules, as many modules as fit, then random ones with the next.
    - `minimal_first`, `unpopular_modules`: all of the first n modules, as many as fit; each other module in one pair with
      module 0; then those of module n with earlier ones, in order. (The public code tells the two apart only where fewer
      combinations than modules are trained on, which is refused here.)
    - `pseudo_random_disconnected`: no combination has modules of both of two groups, the first n and the others, with n as
      large as the fraction allows, up to half; others are held out at random. Compositional, not connected.

    Of sizes of their own, for which the fraction is ignored:

    - `connected`: K = 2; single modules, and pairs at distance 1 and 2 around a ring. `disconnected`: K = 2; single modules
      and all pairs within either half of them. Both hold out the same combinations, those in neither.
    - `non_compositional`: all with the last module are held out.
    - `random_*`: as `random`, training on a number of combinations: `constant` 3/4 of those of M = 16; `linear` that times
      M / 16, `quadratic` times (M / 16)^2; `linear_pure` M; `linear_modules` 8 M; `linear_modules_hot` 8 M K;
      `quadratic_modules` M^2; `quadratic_modules_hot` M^2 K.

    Raises `ConfigError` where no such support exists, with what is possible instead.
    """
    _check_arguments(name, num_modules, num_hot, held_out_fraction)
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy(seed, "support", name))))
    rows_CK = all_combinations(num_modules, num_hot)
    chooser = _Chooser(name, num_modules, num_hot, held_out_fraction, rows_CK, rng)
    if name in ("connected", "disconnected"):
        train, held_out = chooser.ring_or_halves()
    else:
        train = chooser.trained()
        held_out = ~train
    train_CK, held_out_CK = (torch.from_numpy(rng.permutation(rows_CK[part])) for part in (train, held_out))
    return Support(name, num_modules, num_hot, train_CK, held_out_CK)


def all_combinations(num_modules: int, num_hot: int) -> Rows:
    """All combinations of 1 to `num_hot` modules, small ones first, each size in lexicographic order."""
    parts = []
    for size in range(1, num_hot + 1):
        flat = np.fromiter(chain.from_iterable(combinations(range(num_modules), size)), np.int16)
        part = np.full((comb(num_modules, size), num_hot), -1, np.int16)
        part[:, :size] = flat.reshape(-1, size)
        parts.append(part)
    return np.concatenate(parts)


def multi_hot(
    rows_BK: Int[Tensor, "*batch hot"], num_modules: int, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*batch modules"]:
    """1 where a module is in the combination, 0 elsewhere. rows_BK: modules, filled up with -1."""
    index = torch.where(rows_BK < 0, num_modules, rows_BK).long()
    spare = torch.zeros(*rows_BK.shape[:-1], num_modules + 1, dtype=dtype, device=rows_BK.device)
    return spare.scatter_(-1, index, 1.0)[..., :-1]


def usage_counts(rows_CK: Int[Tensor, "combinations hot"], num_modules: int) -> Int[Tensor, "modules"]:
    """How many combinations each module is in."""
    return torch.from_numpy(_usage(rows_CK.cpu().numpy(), num_modules))


def is_compositional(rows_CK: Int[Tensor, "combinations hot"], num_modules: int) -> bool:
    """Whether every module is in a combination."""
    return bool(_usage(rows_CK.cpu().numpy(), num_modules).all())


def is_connected(rows_CK: Int[Tensor, "combinations hot"], num_modules: int) -> bool:
    """Whether every module is in a combination and all are linked by combinations that share modules."""
    return _connected(rows_CK.cpu().numpy(), num_modules)


def _usage(rows_CK: np.ndarray, num_modules: int) -> np.ndarray:
    return np.bincount(rows_CK[rows_CK >= 0].astype(np.int64), minlength=num_modules)


def _connected(rows_CK: np.ndarray, num_modules: int) -> bool:
    import networkx  # late: importing it takes a quarter of a second

    together_MM = np.zeros((num_modules, num_modules), bool)
    for first, second in combinations(range(rows_CK.shape[1]), 2):
        both = (rows_CK[:, first] >= 0) & (rows_CK[:, second] >= 0)
        together_MM[rows_CK[both, first], rows_CK[both, second]] = True
    graph = networkx.from_numpy_array(together_MM)
    return bool(_usage(rows_CK, num_modules).all()) and networkx.is_connected(graph)


def _check_arguments(name: str, num_modules: int, num_hot: int, held_out_fraction: float) -> None:
    allowed = f"one of {', '.join(get_args(SupportName))}"
    check(name in get_args(SupportName), "task.support", name, allowed)
    check(2 <= num_modules < 2**15, "task.num_modules", num_modules, f"from 2 to {2**15 - 1}")
    check(1 <= num_hot <= num_modules, "task.num_hot", num_hot, f"from 1 to num_modules = {num_modules}")
    total = _total(num_modules, num_hot)
    allowed = f"{total:,} combinations of up to {num_hot} of {num_modules} modules; at most {MAX_COMBINATIONS:,}"
    check(total <= MAX_COMBINATIONS, "task.num_hot", num_hot, allowed)
    check(0 <= held_out_fraction < 1, "task.held_out_fraction", held_out_fraction, "from 0 up to, not including, 1")
    if name != "non_compositional":
        check(
            num_hot >= 2, "task.num_hot", num_hot, f"support {name!r} needs modules that are trained on together, so 2"
        )
    if name in ("connected", "disconnected"):
        check(num_hot == 2, "task.num_hot", num_hot, f"support {name!r} is made of pairs, so 2")
        even = num_modules > 4 and num_modules % 2 == 0
        check(even, "task.num_modules", num_modules, f"support {name!r} needs two halves: an even number from 6")


def _total(num_modules: int, num_hot: int) -> int:
    """Number of combinations of 1 to `num_hot` modules."""
    return sum(comb(num_modules, size) for size in range(1, num_hot + 1))


@dataclass(frozen=True)
class _Chooser:
    """Chooses the trained ones among all combinations."""

    name: SupportName
    num_modules: int
    num_hot: int
    fraction: float
    rows: np.ndarray
    rng: np.random.Generator

    def trained(self) -> Chosen:
        if self.name == "non_compositional":
            return ~self._holding(self.num_modules - 1)
        if self.name == "equal":
            return self._equal(self._count(*self._tree_size()))
        if self.name == "pseudo_random_disconnected":
            return self._groups()
        if self.name == "popular_modules":
            return self._popular(self._count(*self._tree_size(), rounded_up=True))
        if self.name in ("minimal_first", "unpopular_modules"):
            return self._minimal(self._count(self.num_modules, "one for each module", rounded_up=True))
        count = self._count(*self._tree_size()) if self.name == "random" else self._own_count()
        everything = np.ones(len(self.rows), bool)
        return self._draw(everything, count, lambda: self._tree(star=False), connected=True)

    # --- how many ---

    def _count(self, needed: int, why: str, rounded_up: bool = False) -> int:
        """How many the fraction leaves to train on: at least `needed`, and fewer than all.

        rounded_up: the number held out, as in the public code for some supports.
        """
        total = len(self.rows)
        count = int(total * (1 - self.fraction)) if rounded_up else total - int(total * self.fraction)
        reason = f"of {total} combinations none would be held out, leaving an empty split"
        check(count < total or self.fraction == 0, "task.held_out_fraction", self.fraction, reason)
        largest = math.floor(1000 * (total - needed) / total) / 1000
        allowed = (
            f"support {self.name!r} needs {needed} or more of {total} combinations in training, {why}, "
            f"and would have {count}; at most {largest:g}"
        )
        check(count >= needed, "task.held_out_fraction", self.fraction, allowed)
        return count

    def _tree_size(self) -> tuple[int, str]:
        """The fewest combinations that connect all modules: each after the first adds num_hot - 1 of them."""
        return -(-(self.num_modules - 1) // (self.num_hot - 1)), f"to connect {self.num_modules} modules"

    def _own_count(self) -> int:
        count, total = _own_count(self.name, self.num_modules, self.num_hot), len(self.rows)
        larger = range(self.num_modules, self.num_modules + 100)
        fits = next((m for m in larger if _own_count(self.name, m, self.num_hot) < _total(m, self.num_hot)), None)
        instead = "more modules active at once (num_hot)" if fits is None else f"at least {fits} modules"
        allowed = (
            f"support {self.name!r} would train on {count} combinations, and there are {total}, none of them held out; "
            f"it needs {instead}"
        )
        check(count < total, "task.num_modules", self.num_modules, allowed)
        return count

    # --- which ---

    def _holding(self, module: int) -> Chosen:
        return (self.rows == module).any(-1)

    def _within(self, first: int, last: int) -> Chosen:
        """Combinations of modules first..last-1 alone."""
        return (self.rows[:, 0] >= first) & (self.rows.max(-1) < last)

    def _draw(
        self,
        among: Chosen,
        count: int,
        built: Callable[[], list[list[int]]],
        connected: bool,
        always: Chosen | None = None,
    ) -> Chosen:
        """`always` and `count` random ones of `among`: compositional, and connected if asked for.

        Uniform given those properties if one of MAX_TRIES draws has them; else those of `built()` are always in.
        """
        candidates = np.flatnonzero(among)
        start = np.zeros(len(among), bool) if always is None else always
        for _ in range(MAX_TRIES):
            chosen = start.copy()
            chosen[self.rng.choice(candidates, count, replace=False, shuffle=False)] = True
            rows = self.rows[chosen]
            if _connected(rows, self.num_modules) if connected else _usage(rows, self.num_modules).all():
                return chosen
        chosen = start.copy()
        chosen[self._places(built())] = True
        rest = np.flatnonzero(among & ~chosen)
        more = count + start.sum() - chosen.sum()
        chosen[self.rng.choice(rest, more, replace=False, shuffle=False)] = True
        return chosen

    def _tree(self, star: bool) -> list[list[int]]:
        """The fewest combinations that connect all modules in a random way, around module 0 in a star."""
        order = [0, *(1 + self.rng.permutation(self.num_modules - 1)).tolist()]
        order = order if star else self.rng.permutation(order).tolist()
        blocks = []
        for start in range(1, self.num_modules, self.num_hot - 1):
            root = 0 if star else order[self.rng.integers(start)]
            blocks.append([root, *order[start : start + self.num_hot - 1]])
        return blocks

    def _places(self, sets: Iterable[Sequence[int]]) -> list[int]:
        """Where given combinations are among all of them."""
        places = []
        for modules in sets:
            row = np.full(self.num_hot, -1, np.int16)
            row[: len(modules)] = sorted(modules)
            places.append(int(np.flatnonzero((self.rows == row).all(-1))[0]))
        return places

    def ring_or_halves(self) -> tuple[Chosen, Chosen]:
        first, second = self.rows.T
        single = second < 0
        distance = second - first
        ring = single | np.isin(distance, (1, 2, self.num_modules - 2, self.num_modules - 1))
        half = self.num_modules // 2
        halves = single | ((first < half) == (second < half))
        return (ring if self.name == "connected" else halves), ~(ring | halves)

    def _groups(self) -> Chosen:
        total = len(self.rows)
        sizes = range(1, self.num_modules // 2 + 1)
        crossing = {n: total - _total(n, self.num_hot) - _total(self.num_modules - n, self.num_hot) for n in sizes}
        smallest = math.ceil(1000 * crossing[1] / total) / 1000
        allowed = f"{crossing[1]} of {total} combinations join module 0 with others and are held out; from {smallest:g}"
        check(crossing[1] <= total * self.fraction, "task.held_out_fraction", self.fraction, allowed)
        n = max(n for n, count in crossing.items() if count <= total * self.fraction)

        def cover() -> list[list[int]]:
            """The fewest combinations within either group that hold each module."""
            groups = self.rng.permutation(n), n + self.rng.permutation(self.num_modules - n)
            return [
                group[start : start + self.num_hot].tolist()
                for group in groups
                for start in range(0, len(group), self.num_hot)
            ]

        count = self._count(len(cover()), f"to hold {self.num_modules} modules")
        within = self._within(0, n) | self._within(n, self.num_modules)
        return self._draw(within, count, cover, connected=False)

    def _popular(self, count: int) -> Chosen:
        total = len(self.rows)
        touching = [total - _total(self.num_modules - n, self.num_hot) for n in range(self.num_modules + 1)]
        n = max(n for n, size in enumerate(touching) if size <= count)
        always = self.rows[:, 0] < n
        if n == self.num_modules:
            return always
        next_ones = self._holding(n) & ~always
        return self._draw(next_ones, count - touching[n], lambda: self._tree(star=True), connected=True, always=always)

    def _minimal(self, count: int) -> Chosen:
        sizes = [_total(n, self.num_hot) + self.num_modules - n for n in range(self.num_modules + 1)]
        n = max(n for n, size in enumerate(sizes) if n >= 1 and size <= count)
        chosen = self._within(0, n)
        chosen[self._places([0, module] for module in range(n, self.num_modules))] = True
        if n < self.num_modules:
            next_ones = self._within(0, n + 1) & self._holding(n) & (self.rows[:, 0] != n) & ~chosen
            chosen[np.flatnonzero(next_ones)[: count - chosen.sum()]] = True
        return chosen

    # --- modules equally often ---

    def _equal(self, count: int) -> Chosen:
        """`count` combinations with usage counts within 1 of each other, compositional and connected.

        Such a set exists wherever a connected one does; see `_level` and `_join`.
        """
        chosen = np.zeros(len(self.rows), bool)
        for _ in range(MAX_TRIES):
            chosen[:] = False
            chosen[self.rng.choice(len(chosen), count, replace=False, shuffle=False)] = True
            self._level(chosen)
            if _connected(self.rows[chosen], self.num_modules):
                return chosen
        self._enlarge(chosen)
        self._level(chosen)
        self._join(chosen)
        return chosen

    def _level(self, chosen: Chosen) -> None:
        """Exchange module a for b in chosen combinations until usage counts are within 1 of each other.

        This always ends. Let a be in d >= 2 more of them than b. Exchanging a for b takes those with a alone one-to-one to
        combinations with b alone, of which d fewer are chosen: for at least d the result is not chosen yet. After d // 2
        of these exchanges the counts of a and b are within 1, and the sum of all squared counts has fallen.
        """
        usage = _usage(self.rows[chosen], self.num_modules)
        place_of = self._place_of()
        while usage.max() - usage.min() > 1:
            a = int(self.rng.choice(np.flatnonzero(usage == usage.max())))
            b = int(self.rng.choice(np.flatnonzero(usage == usage.min())))
            with_a = np.flatnonzero(chosen & self._holding(a) & ~self._holding(b))
            rows = self.rows[with_a]
            result = place_of[_identity(np.where(rows == a, b, rows), self.num_modules)]
            free = np.flatnonzero(~chosen[result])
            moves = int(usage[a] - usage[b]) // 2
            moved = self.rng.choice(free, moves, replace=False, shuffle=False)
            chosen[with_a[moved]] = False
            chosen[result[moved]] = True
            usage[a] -= moves
            usage[b] += moves

    def _place_of(self) -> np.ndarray:
        """Identity of a combination -> its row."""
        place_of = np.empty(len(self.rows), np.int64)
        place_of[_identity(self.rows, self.num_modules)] = np.arange(len(self.rows))
        return place_of

    def _enlarge(self, chosen: Chosen) -> None:
        """Exchange small combinations for ones of num_hot modules until there are enough links to connect all modules.

        Combinations and modules are the nodes of a graph, linked where a module is in a combination: M + N nodes are
        connected by no fewer than M + N - 1 links.
        """
        sizes = (self.rows >= 0).sum(-1)
        full = sizes == self.num_hot
        while sizes[chosen].sum() < self.num_modules + chosen.sum() - 1:
            chosen[self.rng.choice(np.flatnonzero(chosen & ~full))] = False
            chosen[self.rng.choice(np.flatnonzero(~chosen & full))] = True

    def _join(self, chosen: Chosen) -> None:
        """Connect the modules, each staying in as many combinations as before.

        In the graph of `_enlarge` some component has a cycle, as there are enough links. Take module a of combination S
        on the cycle, and c of T in another component, and exchange a and c: S, which holds together without a, gains c;
        T gains a; so both components become one. The results join two components (or are a alone, if T was c alone; but
        then c occurs once, so no module more than twice, and a occurs in two combinations of the cycle): they are new.
        """
        import networkx

        while True:
            graph = networkx.Graph()
            graph.add_nodes_from(("module", m) for m in range(self.num_modules))
            for place in np.flatnonzero(chosen).tolist():
                graph.add_edges_from((("module", m), ("set", place)) for m in self.rows[place].tolist() if m >= 0)
            parts = sorted(networkx.connected_components(graph), key=sorted)
            if len(parts) == 1:
                return
            bridges = {frozenset(edge) for edge in networkx.bridges(graph)}
            on_cycles = sorted(sorted(edge) for edge in graph.edges if frozenset(edge) not in bridges)
            (_, a), cycle = on_cycles[self.rng.integers(len(on_cycles))]
            other = next(part for part in parts if cycle not in part)
            # the largest combination: of two modules or more unless the component is one module alone
            links = [(module, node) for node in sorted(other) if node[0] == "set" for module in sorted(graph[node])]
            (_, c), far = max(links, key=lambda link: graph.degree[link[1]])
            sets = [{m for _, m in graph[node]} for node in (cycle, far)]
            chosen[[cycle[1], far[1]]] = False
            chosen[self._places([list(sets[0] - {a} | {c}), list(sets[1] - {c} | {a})])] = True


def _identity(rows_CK: np.ndarray, num_modules: int) -> np.ndarray:
    """A number below the number of combinations, different for each: the modules may be in any order."""
    num_hot = rows_CK.shape[1]
    # -1 first; then module m in place i (from 1) counts the i-subsets of modules below it
    ordered = np.sort(rows_CK, -1)
    table = np.array([[comb(m, i) for i in range(num_hot + 1)] for m in range(num_modules)])
    sizes = (rows_CK >= 0).sum(-1)
    start = np.array([_total(num_modules, size - 1) for size in range(num_hot + 1)])
    places = np.arange(num_hot) - (num_hot - sizes)[:, None] + 1
    return start[sizes] + np.where(ordered >= 0, table[ordered, np.maximum(places, 0)], 0).sum(-1)


def _own_count(name: str, num_modules: int, num_hot: int) -> int:
    """How many combinations a support of a size of its own trains on."""
    of_16 = 0.75 * _total(16, num_hot)
    scale = num_modules / 16
    counts = {
        "random_constant": of_16,
        "random_linear": of_16 * scale,
        "random_quadratic": of_16 * scale**2,
        "random_linear_pure": num_modules,
        "random_linear_modules": 8 * num_modules,
        "random_linear_modules_hot": 8 * num_modules * num_hot,
        "random_quadratic_modules": num_modules**2,
        "random_quadratic_modules_hot": num_modules**2 * num_hot,
    }
    return int(counts[name])


def split_support(support: Support, source: str, fraction: float) -> dict[str, Tensor]:
    """Combinations `[C, K]` of every split, with a part reserved for validation (:func:`reserve`)."""
    return reserve({"train": support.train, "held_out": support.held_out}, source, fraction)


def reserve(parts: dict[str, Any], source: str, fraction: float) -> dict[str, Any]:
    """Rows of every split that has any: `train`, `held_out` and, if `fraction` > 0, `validation`, the first `fraction` of
    those of `source` (`train` or `held_out`), which are in random order. Raises `ConfigError` where one would be empty."""
    reserved = int(len(parts[source]) * fraction)
    enough = fraction == 0 or 1 <= reserved < len(parts[source])
    allowed = f"of {len(parts[source])} combinations {reserved} would be reserved, leaving an empty split"
    check(enough, "task.validation_fraction", fraction, allowed)
    validation, rest = parts[source][:reserved], parts[source][reserved:]
    found = {"train": parts["train"], "validation": validation, "held_out": parts["held_out"]} | {source: rest}
    return {name: rows for name, rows in found.items() if len(rows)}
