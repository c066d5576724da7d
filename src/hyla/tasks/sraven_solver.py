"""Exact reasoning about SRAVEN puzzles: which answers the given panels allow, and how probable each of them is.

A puzzle is a grid of R x C panels with M positions each; the last panel is the answer. An *explanation* of the given
panels says, for every position of the last column, which position of each other column shows the same feature (an
alignment) and which of the eight rules that feature obeys in every row. Each rule fixes the value missing from the last
row, so an explanation implies an answer.

Explanations are rare (a wrong triple of positions seldom obeys any rule), so they are enumerated as a sparse join over
the positions of the last column, for many puzzles at once; partial explanations that agree on everything that matters
later are merged. That is exact, needs no loop over puzzles, and avoids the `(M!)^(C-1)` alignments of a plain search.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

RULES = (
    "constant",
    "progression +1",
    "progression +2",
    "progression -1",
    "progression -2",
    "addition",
    "subtraction",
    "distribute",
)
"""Names of the rules; a rule's id is its place here."""

STEPS = (0, 1, 2, -1, -2)
"""Change from one column to the next of rules 0..4 (modulo the number of values)."""

ADDITION, SUBTRACTION, DISTRIBUTE = 5, 6, 7

MAX_BITS = 62
"""What one int64 key may hold: sets of values, of used positions and whole answers are packed into such keys."""

_CANDIDATES = 65536  # candidate features looked at together: bounds memory, costs no speed


class IdealAnswer(NamedTuple):
    """What an ideal observer answers.

    answer: `[N, M]`, the most probable answer, -1 where no explanation has a combination the observer believes in.
    probability: `[N]`, its posterior probability (0 in that case), which is the chance that it is right.
    """

    answer: Int[Tensor, "N M"]
    probability: Float[Tensor, " N"]


class _Explanations(NamedTuple):
    """S merged explanations, sorted by puzzle, then by answer; `[S]` each.

    puzzle: the puzzle. answer: its answer, the digits of a number in base `num_values`. rules: sum of the codes of the
    rules used. log_weight: log of the summed likelihood of everything merged here.
    """

    puzzle: Tensor
    answer: Tensor
    rules: Tensor
    log_weight: Tensor


def ambiguous(panels_NRCM: Int[Tensor, "N R C M"], num_values: int, permuted: bool = True) -> Bool[Tensor, " N"]:
    """Whether the given panels also allow another answer than the one in the last panel.

    True where some alignment of the features across the columns, with every feature obeying one of the eight rules on
    the given panels (whole rows but the last, and the last row without its last panel), implies another answer.
    `permuted=False` allows the identity alignment only. Exact, by complete enumeration.

    panels_NRCM: `[N, R, C, M]`, whole grids with values in 0..num_values-1. Raises ValueError as
    :func:`possible_answers` does.
    """
    panels_NRCM = _checked(panels_NRCM, num_values)
    found_N = torch.zeros(len(panels_NRCM), dtype=torch.bool, device=panels_NRCM.device)
    for start, chunk_nRCM in _chunks(panels_NRCM, permuted):
        found = _explain(chunk_nRCM, num_values, permuted, against=chunk_nRCM[:, -1, -1])
        found_N[found.puzzle[found.answer == 1] + start] = True
    return found_N


def possible_answers(
    panels_NRCM: Int[Tensor, "N R C M"], num_values: int, permuted: bool = True
) -> tuple[Int[Tensor, " A"], Int[Tensor, "A M"]]:
    """Every answer that some explanation of the given panels implies, under any combination of rules.

    Returns `puzzle [A]`, ascending, and `answer [A, M]`: answer a is possible for puzzle `puzzle[a]`; no pair repeats.
    The last panel is never looked at. Raises ValueError where the grid has fewer than two rows or three columns, where
    a value lies outside 0..num_values-1, or where a puzzle is too large to be enumerated exactly.
    """
    panels_NRCM = _checked(panels_NRCM, num_values)
    num_features = panels_NRCM.shape[-1]
    puzzles, answers = [], []
    for start, chunk_nRCM in _chunks(panels_NRCM, permuted):
        found = _explain(chunk_nRCM, num_values, permuted)
        puzzles.append(found.puzzle + start)
        answers.append(_digits(found.answer, num_values, num_features))
    if not puzzles:
        nothing = panels_NRCM.new_zeros(0, dtype=torch.int64)
        return nothing, nothing.view(0, num_features)
    return torch.cat(puzzles), torch.cat(answers)


def ideal_answer(
    panels_NRCM: Int[Tensor, "N R C M"],
    num_values: int,
    combinations: Sequence[Sequence[int]],
    *,
    permuted: bool = True,
    shuffled: bool = False,
) -> IdealAnswer:
    """The most probable answer and its posterior probability, for an observer that knows how puzzles are generated.

    With x the given panels and a an answer, ::

        p(a | x)  is proportional to  sum_S p(S) sum_r p(r | S) sum_A prod_j p(values of feature j under rule r_j)

    S runs over `combinations`, which the observer believes equally likely; r over the ways to hand the rules of S to
    the M positions of the last column; A over the alignments, all equally likely. Values are drawn as the generator
    draws them: per row one of V values for constants and progressions, and one of V^(C-1) rows for addition and
    subtraction; for distribute one of binomial(V, C) sets and per row one of C! orders.

    combinations: sorted lists of M rule ids. permuted, shuffled: as in the task's configuration (`permute_features`,
    `shuffle_rules`); where neither holds, position j carries the j-th rule of the combination. The last panel is never
    looked at. Raises ValueError as :func:`possible_answers` does, and for a combination that is not M sorted rule ids.
    """
    panels_NRCM = _checked(panels_NRCM, num_values)
    _, num_rows, num_columns, num_features = panels_NRCM.shape
    device = panels_NRCM.device
    if not combinations:
        raise ValueError("combinations is empty: the observer must believe in at least one combination of rules")
    for combination in combinations:
        valid = len(combination) == num_features and set(combination) <= set(range(len(RULES)))
        if not valid or list(combination) != sorted(combination):
            raise ValueError(
                f"combination {tuple(combination)} is not {num_features} sorted rule ids of 0..{len(RULES) - 1}"
            )
    codes_M8, codes_K, prior_K = _code_book(combinations, num_features, ordered=not (permuted or shuffled))
    codes_K, prior_K = codes_K.to(device), prior_K.to(device)
    likelihood_8 = _log_likelihoods(num_values, num_rows, num_columns)
    answers, probabilities = [], []
    for _, chunk_nRCM in _chunks(panels_NRCM, permuted):
        found = _explain(chunk_nRCM, num_values, permuted, codes_M8=codes_M8, likelihood_8=likelihood_8)
        place_S = torch.searchsorted(codes_K, found.rules).clamp(max=len(codes_K) - 1)
        known_S = codes_K[place_S] == found.rules
        puzzle_S, answer_S = found.puzzle[known_S], found.answer[known_S]
        weight_S = found.log_weight[known_S] + prior_K[place_S[known_S]]
        group_S, rows_A = _group(puzzle_S, answer_S)
        weight_A = _logsumexp(weight_S, group_S, len(rows_A))
        puzzle_A, answer_A = puzzle_S[rows_A], answer_S[rows_A]
        total_N = _logsumexp(weight_A, puzzle_A, len(chunk_nRCM))
        probability_A = (weight_A - total_N[puzzle_A]).exp()
        best_N = weight_A.new_zeros(len(chunk_nRCM)).scatter_reduce(0, puzzle_A, probability_A, "amax")
        is_best_A = probability_A == best_N[puzzle_A]
        # of equally probable answers the one with the smallest digits
        none = torch.iinfo(torch.int64).max
        chosen_N = torch.full((len(chunk_nRCM),), none, device=device)
        chosen_N = chosen_N.scatter_reduce(0, puzzle_A[is_best_A], answer_A[is_best_A], "amin")
        digits_NM = _digits(chosen_N, num_values, num_features)
        answers.append(digits_NM.masked_fill((chosen_N == none)[:, None], -1))
        probabilities.append(best_N)
    if not answers:
        return IdealAnswer(
            torch.zeros(0, num_features, dtype=torch.int64, device=device),
            torch.zeros(0, dtype=torch.float64, device=device),
        )
    return IdealAnswer(torch.cat(answers), torch.cat(probabilities))


def fitting_rules(
    panels_NRCM: Int[Tensor, "N R C M"], positions_KC: Int[Tensor, "K C"], num_values: int
) -> tuple[Bool[Tensor, "N K 8"], Int[Tensor, "N K 8"]]:
    """Which rules the values at `positions` obey on the given panels, and the answer that each rule implies.

    positions_KC: K candidate features, a position for each column. Returns `fits [N, K, 8]` and `answers [N, K, 8]`,
    which mean something only where `fits` holds.
    """
    _, _, num_columns, _ = panels_NRCM.shape
    columns = [panels_NRCM[:, :, c].index_select(-1, positions_KC[:, c]) for c in range(num_columns)]  # [N, R, K] each
    first, before_last, last = columns[0], columns[-2], columns[-1][:, :-1]

    step_NK = (columns[1] - first)[:, 0] % num_values
    steady = torch.ones_like(step_NK, dtype=torch.bool)
    for c in range(num_columns - 1):
        change = (columns[c + 1] - columns[c]) % num_values
        change = change[:, :-1] if c == num_columns - 2 else change  # the last row's last panel is not given
        steady &= (change == step_NK[:, None]).all(1)
    fits = [steady & (step_NK == step % num_values) for step in STEPS]
    answers = [(before_last[:, -1] + step) % num_values for step in STEPS]

    total = torch.stack(columns[:-1]).sum(0)
    for outcome in (total % num_values, (2 * first - total) % num_values):
        fits.append((outcome[:, :-1] == last).all(1))
        answers.append(outcome[:, -1])

    # sets of values as bit masks: the sum of the bits equals their union exactly where all values are distinct
    one = torch.ones((), dtype=torch.int64, device=panels_NRCM.device)
    given, given_sum = torch.zeros_like(first, dtype=torch.int64), torch.zeros_like(first, dtype=torch.int64)
    for column in columns[:-1]:
        given, given_sum = given | (one << column), given_sum + (one << column)
    rows = given[:, :-1] | (one << last)
    set_NK = rows[:, 0]
    whole = (set_NK == given_sum[:, 0] + (one << last[:, 0])) & (rows == set_NK[:, None]).all(1)
    fits.append(whole & (given[:, -1] == given_sum[:, -1]) & ((given[:, -1] & ~set_NK) == 0))
    answers.append(total[:, 0] + last[:, 0] - total[:, -1])
    return torch.stack(fits, -1), torch.stack(answers, -1)


def too_large(num_values: int, num_columns: int, num_features: int) -> str:
    """Why puzzles of this size cannot be solved here; empty where they can."""
    bits = {
        "values": num_values,
        "answers": num_features * math.log2(num_values),
        "positions": num_features * (num_columns - 1),
    }
    for what, needed in bits.items():
        if needed > MAX_BITS:
            size = f"{num_features} features of {num_values} values in {num_columns} columns"
            return f"{size} are too many to enumerate: the {what} need {math.ceil(needed)} bits of {MAX_BITS}"
    return ""


def _chunks(panels_NRCM: Tensor, permuted: bool) -> Iterator[tuple[int, Tensor]]:
    """The puzzles in chunks, each with the number of its first puzzle."""
    num_columns, num_features = panels_NRCM.shape[2:]
    size = max(1, _CANDIDATES // (num_features**num_columns if permuted else num_features))
    for start in range(0, len(panels_NRCM), size):
        yield start, panels_NRCM[start : start + size]


def _explain(
    panels_NRCM: Tensor,
    num_values: int,
    permuted: bool,
    *,
    codes_M8: Tensor | None = None,
    likelihood_8: Tensor | None = None,
    against: Tensor | None = None,
) -> _Explanations:
    """Join the candidate features of every position of the last column into whole explanations.

    codes_M8: what rule r at position j adds to `rules`. likelihood_8: what a rule adds to `log_weight`. Without them,
    explanations that differ in their rules only are merged. against: an answer `[N, M]` for each puzzle, in which case
    `answer` is only 1 where an explanation implies another one, else 0.
    """
    num_puzzles, _, num_columns, num_features = panels_NRCM.shape
    device = panels_NRCM.device
    if permuted:  # the position in the last column varies slowest
        grid = torch.cartesian_prod(*[torch.arange(num_features, device=device)] * num_columns)
        positions_KC = grid.view(-1, num_columns).roll(-1, dims=1)
    else:
        positions_KC = torch.arange(num_features, device=device)[:, None].expand(-1, num_columns).contiguous()
    fits, answers = fitting_rules(panels_NRCM, positions_KC, num_values)

    # E ways to explain one position of one puzzle, sorted by puzzle, then by position
    puzzle_E, k_E, rule_E = fits.nonzero(as_tuple=True)
    positions_EC = positions_KC[k_E]
    position_E = positions_EC[:, -1]
    other_columns = torch.arange(num_columns - 1, device=device) * num_features
    used_E = (1 << (positions_EC[:, :-1] + other_columns)).sum(-1)
    answer_E = answers[puzzle_E, k_E, rule_E]
    if against is not None:
        answer_E = (answer_E != against[puzzle_E, position_E]).long()
    rules_E = torch.zeros_like(rule_E) if codes_M8 is None else codes_M8.to(device)[position_E, rule_E]
    weight_8 = torch.zeros(len(RULES), dtype=torch.float64) if likelihood_8 is None else likelihood_8
    weight_E = weight_8.to(device)[rule_E]
    count_NM = torch.bincount(puzzle_E * num_features + position_E, minlength=num_puzzles * num_features)
    start_NM = count_NM.cumsum(0) - count_NM

    puzzle_S = torch.arange(num_puzzles, device=device)
    used_S, answer_S, rules_S = (torch.zeros(num_puzzles, dtype=torch.int64, device=device) for _ in range(3))
    weight_S = torch.zeros(num_puzzles, dtype=torch.float64, device=device)
    for position in range(num_features):
        cell_S = puzzle_S * num_features + position
        count_S = count_NM[cell_S]
        state = torch.arange(len(puzzle_S), device=device).repeat_interleave(count_S)
        nth = torch.arange(len(state), device=device) - (count_S.cumsum(0) - count_S)[state]
        way = start_NM[cell_S][state] + nth
        if permuted:
            free = (used_S[state] & used_E[way]) == 0
            state, way = state[free], way[free]
        puzzle = puzzle_S[state]
        used = used_S[state] | used_E[way]
        answer = answer_S[state] * num_values + answer_E[way] if against is None else answer_S[state] | answer_E[way]
        rules = rules_S[state] + rules_E[way]
        group, rows = _group(puzzle, answer, used, rules)
        weight_S = _logsumexp(weight_S[state] + weight_E[way], group, len(rows))
        puzzle_S, used_S, answer_S, rules_S = puzzle[rows], used[rows], answer[rows], rules[rows]
    return _Explanations(puzzle_S, answer_S, rules_S, weight_S)


def _group(*columns: Tensor) -> tuple[Tensor, Tensor]:
    """Number rows of equal columns alike, in sorted order: the group of each row, and one row of each group."""
    group = columns[0]
    for column in columns[1:]:
        if len(group) == 0:
            return group, group
        size, width = int(group.max()) + 1, int(column.max()) + 1
        if size * width >= 2**MAX_BITS:
            group, column = (torch.unique(values, return_inverse=True)[1] for values in (group, column))
            width = int(column.max()) + 1
        group = group * width + column
    values, group = torch.unique(group, return_inverse=True)
    rows = torch.empty_like(values).scatter_(0, group, torch.arange(len(group), device=group.device))
    return group, rows


def _logsumexp(values_S: Tensor, group_S: Tensor, num_groups: int) -> Tensor:
    """log of the sum of exp(values) in each group; -inf for a group without any."""
    top = values_S.new_full((num_groups,), -math.inf).scatter_reduce(0, group_S, values_S, "amax")
    return top + torch.zeros_like(top).scatter_add(0, group_S, (values_S - top[group_S]).exp()).log()


def _digits(code_A: Tensor, base: int, num_digits: int) -> Tensor:
    """The digits `[A, num_digits]` of numbers in base `base`, first digit first."""
    powers = torch.tensor([base**place for place in reversed(range(num_digits))], device=code_A.device)
    return code_A[:, None] // powers % base


def _code_book(
    combinations: Sequence[Sequence[int]], num_features: int, ordered: bool
) -> tuple[Int[Tensor, "M 8"], Int[Tensor, " K"], Float[Tensor, " K"]]:
    """Codes whose sum over the positions names a combination; the combinations' codes, ascending; their log priors.

    Unordered, a rule has the same code at every position: the sum names the multiset. Of the M! ways to hand the rules
    of a combination to the positions, each distinct assignment stands for as many as the product of the factorials of
    the rules' multiplicities. Factors common to all combinations are left out.
    """
    num_rules = len(RULES)
    if ordered:
        table = [[rule * num_rules**position for rule in range(num_rules)] for position in range(num_features)]
    else:
        table = [[(num_features + 1) ** rule for rule in range(num_rules)]] * num_features
    book = {}
    for combination in combinations:
        code = sum(table[position][rule] for position, rule in enumerate(combination))
        ways = 1 if ordered else math.prod(math.factorial(list(combination).count(rule)) for rule in range(num_rules))
        book[code] = math.log(ways)
    codes = sorted(book)
    priors = torch.tensor([book[code] for code in codes], dtype=torch.float64)
    return torch.tensor(table), torch.tensor(codes, dtype=torch.int64), priors


def _log_likelihoods(num_values: int, num_rows: int, num_columns: int) -> Float[Tensor, " 8"]:
    """log p(all values of one feature | rule) wherever they obey the rule."""
    one_start = -num_rows * math.log(num_values)
    operands = one_start * (num_columns - 1)
    sets = -math.log(math.comb(num_values, num_columns)) if num_values >= num_columns else -math.inf
    distribute = sets - num_rows * math.log(math.factorial(num_columns))
    return torch.tensor([*[one_start] * len(STEPS), operands, operands, distribute], dtype=torch.float64)


def _checked(panels_NRCM: Tensor, num_values: int) -> Tensor:
    """The panels as int64; raises ValueError where they are no puzzles, or too large ones for 62-bit keys."""
    num_puzzles, num_rows, num_columns, num_features = panels_NRCM.shape
    if num_rows < 2 or num_columns < 3 or num_features < 1:
        raise ValueError(f"panels of shape {tuple(panels_NRCM.shape)}: need 2 rows, 3 columns and 1 feature or more")
    reason = too_large(num_values, num_columns, num_features)
    if reason:
        raise ValueError(reason)
    if num_puzzles and not 0 <= int(panels_NRCM.min()) <= int(panels_NRCM.max()) < num_values:
        raise ValueError(f"panels hold values outside 0..{num_values - 1}")
    return panels_NRCM.long()
