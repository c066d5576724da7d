"""Analyses of latent codes that no model made: codes with the class planted in the last layer and noise in the first."""

from __future__ import annotations

from typing import Any

import numpy as np

from hyla.report.drawings import function_text, puzzle_text

RULES = ["constant", "progression +1", "progression +2", "progression -1", "progression -2", "addition", "subtraction"]
RULES += ["distribute three"]
TERMS = [" ∧ ".join(("" if bit == "1" else "¬") + f"x{i + 1}" for i, bit in enumerate(f"{n:04b}")) for n in range(12)]


def sraven(num_points: int = 240) -> dict[str, Any]:
    """HYLA and softmax attention, 4 layers, 8 rules. The last rule is absent from the held-out mean codes."""
    keys = ["panel 7", "panel 8", "panel 9 (itself)"]
    shared = {"task": "sraven", "num_heads": 16, "keys": keys, "label": "rule", "classes": RULES}
    shared |= {"pairs": "query: the last feature of the last panel; keys: the same feature in the last row"}
    planted = {"hyla": (0.0, 0.25, 0.6, 1.0), "softmax": (0.0, 0.1, 0.2, 0.3)}
    models = []
    for place, (mechanism, strengths) in enumerate(planted.items()):
        rng = np.random.default_rng(place)
        points = _points(rng, num_points, len(RULES), _puzzle)
        absent = {len(RULES) - 1}
        layers = [_layer(rng, points, shared, at, strength, absent) for at, strength in enumerate(strengths)]
        for layer, strength in zip(layers, strengths, strict=True):
            layer["probes"] = _logistic(strength) + [
                score | {"test": "train", "count": 4096, "tasks": 27} for score in _logistic(min(1.0, strength + 0.05))
            ]
            layer["per_class"] = [
                {"class": name, "f1": None if i == 7 else min(1.0, 0.02 * i + 0.9 * strength), "precision": strength,
                 "recall": None if i == 7 else strength, "count": 0 if i == 7 else 100 + 90 * i}
                for i, name in enumerate(RULES)
            ]  # fmt: skip
            layer["few_shot"] = [
                {"examples": n, "value": strength * n / (n + 1), "low": strength * n / (n + 2), "high": strength,
                 "note": ""} for n in (1, 2, 5, 10)
            ]  # fmt: skip
            layer["few_shot"].append(
                {"examples": 50, "value": None, "low": None, "high": None, "note": "1 rule has fewer examples"}
            )
            layer["causal"] = _causal(rng, strength)
        splits = {"train": {"count": 4096, "tasks": 27, "accuracy": 0.98}}
        splits |= {"held_out": {"count": 4096, "tasks": 9, "accuracy": 0.84 - 0.2 * place}}
        models.append(
            shared | {"name": f"sraven-{mechanism}-seed0", "run": "../..", "mechanism": mechanism, "seed": 0}
            | {"step": 20_000, "splits": splits, "layers": layers, "layer_similarity": _similar(layers), "points": points}
        )  # fmt: skip
    notes = ["Probes are fitted on trained combinations and scored on combinations that were never trained on."]
    notes += [
        "Intervals resample the tasks of the test set, 1,000 times, since sequences of one task are not independent."
    ]
    notes += ["The control repeats the whole fit 5 times with the labels of training tasks shuffled."]
    return {"format": 1, "title": "Latent codes of two models on SRAVEN", "notes": notes, "models": models} | {
        "command": "hyla latents runs/sraven-hyla-seed0 runs/sraven-softmax-seed0"
    }


def logic(num_points: int = 240) -> dict[str, Any]:
    """HYLA, 2 layers, 12 terms; R2 of term bits, undefined in the first layer on unseen terms, and no causal check."""
    rng = np.random.default_rng(5)
    model = {"name": "logic-hyla-seed2024", "run": "../..", "task": "logic", "mechanism": "hyla", "seed": 2024}
    model |= {"step": 50_000, "num_heads": 8, "pairs": "query and key: the last point", "keys": ["last point"]}
    model |= {"splits": {"train": {"count": 4096, "tasks": 33, "accuracy": None}}, "label": "term", "classes": TERMS}
    model["splits"]["held_out"] = {"count": 4096, "tasks": 33, "accuracy": None}
    points = _points(rng, num_points, len(TERMS), _function)
    layers = [_layer(rng, points, model, at, strength, set()) for at, strength in enumerate((0.1, 0.9))]
    for layer, value in zip(layers, (0.08, 0.91), strict=True):
        ridge = {"probe": "ridge", "target": "term bits", "train": "train", "test": "held_out", "metric": "R2"}
        ridge |= {"value": value, "low": value - 0.05, "high": value + 0.03, "chance": -0.002, "control": -0.011}
        ridge |= {"control_high": -0.004, "count": 4096, "tasks": 33, "note": "2 of 8 targets constant, left out"}
        reference = ridge | {"probe": "ridge (reference)", "value": -3.0e8, "low": None, "high": None, "control": None}
        unseen = ridge | {"test": "unseen_terms", "value": None, "low": None, "high": None, "chance": None}
        layer["probes"] = [ridge, reference | {"control_high": None}, unseen | {"note": "8 of 8 targets constant"}]
        layer |= {"per_class": [], "few_shot": [], "causal": None}
    model |= {"layers": layers, "layer_similarity": _similar(layers), "points": points}
    document = {"format": 1, "title": "Latent codes on fuzzy logic", "command": "hyla latents runs/logic-hyla-seed2024"}
    return document | {"notes": ["Ridge regression of the 8 bits of both terms, penalty 1."], "models": [model]}


def _points(rng: np.random.Generator, number: int, num_classes: int, text: Any) -> dict[str, Any]:
    classes = [int(i) for i in np.arange(number) % num_classes]
    splits = ["held_out" if i // num_classes % 3 == 0 else "train" for i in range(number)]
    tasks = [f"{splits[i]} {i % 27}" for i in range(number)]
    correct = [int(value) for value in rng.random(number) < 0.85]
    texts = [text(rng, i) for i in classes]
    return {"split": splits, "class": classes, "correct": correct, "task": tasks, "text": texts}


def _puzzle(rng: np.random.Generator, rule: int) -> str:
    return puzzle_text(rng.integers(0, 8, (3, 3, 4)), [*rng.choice(RULES[: rule + 1], 3), RULES[rule]], 8)


def _function(rng: np.random.Generator, term: int) -> str:
    bits = [[int(bit) for bit in f"{n:04b}"] for n in (term, int(rng.integers(0, 12)))]
    return function_text(bits, rng.random((16, 4)), rng.random(16), max_points=3)


def _layer(rng: np.random.Generator, points: Any, model: Any, at: int, strength: float, absent: set[int]) -> Any:
    class_P, num_classes = np.array(points["class"]), len(model["classes"])
    size = model["num_heads"] * len(model["keys"])
    codes_PN = rng.normal(0, 1, (len(class_P), size)) + 1.6 * strength * rng.normal(0, 1, (num_classes, size))[class_P]
    codes_PN = codes_PN.reshape(len(class_P), -1, model["num_heads"])
    codes_PN = (codes_PN / np.sqrt((codes_PN**2).mean(-1, keepdims=True))).reshape(len(class_P), size)
    means_CN = np.stack([codes_PN[class_P == i].mean(0) for i in range(num_classes)])
    unit_CN = means_CN / np.linalg.norm(means_CN, axis=1, keepdims=True)
    cosines_CC = unit_CN @ unit_CN.T
    turn = 2 * np.pi * class_P / num_classes
    place_P2 = 40 * strength * np.stack([np.cos(turn), np.sin(turn)], 1) + rng.normal(0, 7, (len(class_P), 2))
    distance_PP = np.linalg.norm(place_P2[:, None] - place_P2[None], axis=-1)
    near_PK = np.argsort(distance_PP, 1)[:, 1:11]
    purity = float((class_P[near_PK] == class_P[:, None]).mean())
    counts = [0 if i in absent else int((class_P == i).sum()) for i in range(num_classes)]
    structure = [
        {"split": split, "silhouette": strength - 0.2, "purity": purity, "purity_chance": 1 / num_classes,
         "purity_other_tasks": 0.95 * purity} for split in ("train", "held_out")
    ]  # fmt: skip
    present = [[i not in absent and j not in absent for j in range(num_classes)] for i in range(num_classes)]
    return {
        "name": f"blocks.{at}.attention",
        "title": f"layer {at + 1}",
        "structure": structure,
        "projection": {"method": "tsne", "x": place_P2[:, 0].tolist(), "y": place_P2[:, 1].tolist()},
        "mean_codes": {
            "split": "held_out",
            "values": [None if i in absent else row.tolist() for i, row in enumerate(means_CN)],
            "counts": counts,
        },
        "cosines": [
            [float(value) if known else None for value, known in zip(row, knowns, strict=True)]
            for row, knowns in zip(cosines_CC, present, strict=True)
        ],
    }


def _logistic(strength: float) -> list[dict[str, Any]]:
    score = {"probe": "logistic", "target": "rule", "train": "train", "test": "held_out", "count": 4096, "tasks": 9}
    f1, accuracy = 0.12 + 0.82 * strength, 0.3 + 0.66 * strength
    first = {"metric": "macro F1", "value": f1, "low": f1 - 0.04, "high": f1 + 0.03, "chance": 0.06, "control": 0.1}
    second = {"metric": "accuracy", "value": accuracy, "low": accuracy - 0.03, "high": accuracy + 0.02, "chance": 0.36}
    first |= {"control_high": 0.13, "note": "" if strength else "did not converge"}
    return [score | first, score | second | {"control": 0.31, "control_high": 0.35, "note": ""}]


def _causal(rng: np.random.Generator, strength: float) -> dict[str, Any]:
    effect = [[0.05 if i == j else float(np.clip(0.05 + strength * rng.uniform(0.4, 0.9), 0, 1)) for j in range(8)]
              for i in range(8)]  # fmt: skip
    effect[7] = [None] * 8
    other = float(np.mean([value for i, row in enumerate(effect[:7]) for j, value in enumerate(row) if i != j]))
    causal = {"split": "held_out", "effect": effect, "effect_unit": "share of answers changed", "same": 0.05}
    causal |= {"other": other, "other_low": other - 0.03, "other_high": other + 0.03, "count": 2048}
    return causal | {"follows": 0.04 + 0.5 * strength, "follows_before": 0.04}


def _similar(layers: list[Any]) -> list[list[float | None]]:
    flat = [
        [value for i, row in enumerate(layer["cosines"]) for value in row[:i] if value is not None] for layer in layers
    ]
    return [[float(value) for value in row] for row in np.corrcoef(flat)]
