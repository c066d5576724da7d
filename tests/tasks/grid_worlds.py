"""The two grid worlds once more, one episode at a time in plain Python: what the batched ones are compared with."""

import networkx

from hyla.tasks.grid import MOVES


def free_graph(walls):
    """The free cells as a graph, linked where one can walk from one to the other."""
    free = {(r, c) for r, row in enumerate(walls) for c, wall in enumerate(row) if not wall}
    graph = networkx.Graph()
    graph.add_nodes_from(free)
    graph.add_edges_from((a, (a[0] + d, a[1] + r)) for a in free for d, r in MOVES if (a[0] + d, a[1] + r) in free)
    return graph


def walk(walls, cell, move):
    """The cell after one of four moves."""
    row, column = cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]
    inside = 0 <= row < len(walls) and 0 <= column < len(walls[0])
    return (row, column) if inside and not walls[row][column] else cell


def collect(walls, start, worth, actions, limit):
    """(rewards, cells before each action) in the preference grid; worth: cell -> value."""
    cell, left, rewards, cells = start, dict(worth), [], []
    for action in actions[:limit]:
        cells.append(cell)
        if action == 0:
            rewards.append(0.0)
            break
        cell = walk(walls, cell, action - 1)
        rewards.append(left.pop(cell, 0.0))
    return rewards, cells


def read_observations(task, points):
    """(agent `[...]`, [(cell, kind), ...] of each) from normalised observations `[..., point_dim]`."""
    size = task.walls.shape[-1]
    seen = points.unflatten(-1, (size * size, task.num_kinds + 2)) > 0
    agent = seen[..., task.num_kinds].int().argmax(-1)
    objects = [row.nonzero().tolist() for row in seen[..., : task.num_kinds].flatten(0, -3)]
    return agent, objects
