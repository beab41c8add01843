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

from flax.nnx import graphlib, statelib, variablelib
from flax.nnx.training.snapshot import Snapshot, is_stateful, path_str


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
    self._leaves, self._treedef = jax.tree.flatten(
      (args, kwargs), is_leaf=is_stateful
    )
    self._places = [i for i, x in enumerate(self._leaves) if is_stateful(x)]
    # Taken apart together, since they may share Variables.
    self.nodes = tuple(self._leaves[i] for i in self._places)
    self._snapshot = Snapshot(self.nodes, False, graph=graph).freeze()

  def copies(self) -> tuple[tp.Any, tp.Any, tp.Any]:
    """Copies of what holds state, and the arguments with them in place."""
    snapshot = self._snapshot
    nodes = snapshot.merge(snapshot.params) if self.nodes else ()
    leaves = list(self._leaves)
    for place, node in zip(self._places, nodes):
      leaves[place] = node
    args, kwargs = self._treedef.unflatten(leaves)
    return nodes, args, kwargs

  def changed_in(self, nodes: tp.Any) -> tp.Any:
    """State of what copies hold after an evaluation, where it has changed."""
    if not nodes:
      return {}
    after = Snapshot(nodes, False, graph=self._snapshot.graph).rest
    state, paths = changes(self._snapshot.rest, after)
    check_reachable(self.nodes, state, 'an argument of the loss')
    return state if paths else {}

  def write(self, state: tp.Any) -> None:
    """Writes what ``changed_in`` returned into the arguments themselves."""
    if state:
      graphlib.update(self.nodes, state)

  def check_apart_from(self, model: tp.Any) -> None:
    """Checks that no Variable is in the model and in an argument.

    Raises:
      ValueError: one is. Each of the two would see a copy of its own.
    """
    if not self.nodes:
      return
    own = {id(x): path for path, x in _variables(model)}
    for path, variable in _variables(self.nodes):
      if id(variable) in own:
        raise ValueError(
          f'The model and an argument of the loss share a Variable, {path} in '
          f'the argument and {own[id(variable)]} in the model. Take it from '
          'the model in the loss function, or pass a copy (nnx.clone).'
        )


def _variables(node: tp.Any) -> list[tuple[str, tp.Any]]:
  found = {}
  for path, x in graphlib.iter_graph(node):
    if isinstance(x, variablelib.Variable):
      found[id(x)] = (path_str(path), x)
  return list(found.values())


def check_reachable(node: tp.Any, state: tp.Any, name: str) -> None:
  """Checks that new Variables can be put where a forward pass put them.

  Args:
    node: the model or the arguments before the pass.
    state: State of what the pass changed.
    name: what to call ``node``.

  Raises:
    ValueError: one is in a Module that the pass created.
  """
  for path, _ in statelib.to_flat_state(state):
    parent = node
    for key in path[:-1]:
      is_index = isinstance(parent, (tuple, list, dict))
      try:
        parent = parent[key] if is_index else getattr(parent, key, None)
      except (KeyError, IndexError):
        parent = None
      if parent is None:
        raise ValueError(
          f'The loss creates {path_str(path)} of {name}, in a Module that was '
          'not there before. Create Modules in __init__, or call the model '
          'once before it is optimized.'
        )


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
