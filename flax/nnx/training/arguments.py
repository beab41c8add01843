# Copyright 2026 The Flax Authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Arguments of a loss function that may hold state of their own.

A loss may be given Modules besides the model: an ``nnx.Rngs``, a teacher, a
metric. Each evaluation gets copies of them as they stood at the start, like
the model; what the one forward pass changed in its copies is written back.
"""
from __future__ import annotations

import typing as tp

import jax

from flax.nnx import graphlib, statelib
from flax.nnx.training.snapshot import Snapshot, is_stateful


class Arguments:
  """Positional and keyword arguments, copied afresh for each evaluation.

  Args:
    args: positional arguments.
    kwargs: keyword arguments.
    graph: graph mode of the optimizer.
  """

  def __init__(
    self,
    args: tuple[tp.Any, ...],
    kwargs: dict[str, tp.Any],
    *,
    graph: bool | None,
  ):
    self._graph = graph
    leaves, self._treedef = jax.tree.flatten(
      (args, kwargs), is_leaf=is_stateful
    )
    self._leaves = leaves
    self._snapshots = {
      i: Snapshot(leaf, False, graph=graph).freeze()
      for i, leaf in enumerate(leaves)
      if is_stateful(leaf)
    }

  def copies(self) -> list[tp.Any]:
    """The leaves, with copies of those that hold state."""
    leaves = list(self._leaves)
    for i, snapshot in self._snapshots.items():
      leaves[i] = snapshot.merge(snapshot.params)
    return leaves

  def unflatten(self, leaves: list[tp.Any]) -> tuple[tp.Any, tp.Any]:
    """Arguments and keyword arguments made of ``leaves``."""
    return self._treedef.unflatten(leaves)

  def states(self, leaves: list[tp.Any]) -> dict[int, tp.Any]:
    """What copies hold after an evaluation; empty where nothing changed."""
    states = {}
    for i, snapshot in self._snapshots.items():
      after = Snapshot(leaves[i], False, graph=self._graph).rest
      state, changed = changes(snapshot.rest, after)
      if changed:
        states[i] = state
    return states

  def write(self, states: dict[int, tp.Any]) -> None:
    """Writes what ``states`` returned into the arguments themselves."""
    for i, state in states.items():
      graphlib.update(self._leaves[i], state)


def changes(before: tp.Any, after: tp.Any) -> tuple[tp.Any, list[tp.Any]]:
  """What of a State is not the very same value any more.

  Args:
    before: State before a forward pass.
    after: State after it.

  Returns:
    A State of what changed (values, and Variables where they are new), and the
    paths of it. Known while tracing: an untouched Variable holds the very array
    that it held before.
  """
  if not isinstance(after, statelib.State):  # a Variable by itself
    same = _same(before, after)
    return (graphlib.as_pure(after), [] if same else [()])
  entries = dict(statelib.to_flat_state(before))
  changed = []
  for path, leaf in statelib.to_flat_state(after):
    if path not in entries:
      changed.append((path, leaf))
    elif not _same(entries[path], leaf):
      changed.append((path, graphlib.as_pure(leaf)))
  state = statelib.from_flat_state(changed)
  return state, [path for path, _ in changed]


def _same(before: tp.Any, after: tp.Any) -> bool:
  old, new = (jax.tree.leaves(graphlib.as_pure(x)) for x in (before, after))
  return len(old) == len(new) and all(a is b for a, b in zip(old, new))
