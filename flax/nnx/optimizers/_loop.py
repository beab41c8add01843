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
"""The loop behind ``minimize``: train steps in a ``jax.lax.while_loop``."""
from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
import optax

from flax.nnx import graphlib, statelib, variablelib
from flax.nnx.optimizers._search import LinesearchOptimizer
from flax.nnx.training import evaluation, reuse, write_back
from flax.nnx.training.snapshot import Snapshot, is_stateful, path_str
from flax.nnx.training.steps import apply_evaluation

MAX_FAILURES = 15


class _Carry(tp.NamedTuple):
  """What a step hands on to the next.

  Attributes:
    values: pure values of all Variables.
    pending: the evaluation at these values, for the next update; what its
      forward pass changed is not among ``values`` yet.
    num_steps: updates made.
    failures: line searches that failed since one did not.
  """

  values: list[tp.Any]
  pending: evaluation.Evaluation
  num_steps: jax.Array
  failures: jax.Array


class _Nodes:
  """Optimizer, model, and arguments, taken apart and put together again."""

  def __init__(self, optimizer, model, args, kwargs):
    leaves, self._args_treedef = jax.tree.flatten(
      (args, kwargs), is_leaf=is_stateful
    )
    self._leaves = leaves
    self._places = [i for i, leaf in enumerate(leaves) if is_stateful(leaf)]
    self.graph = optimizer.graph
    self._nodes = (optimizer, model, *(leaves[i] for i in self._places))
    self._graphdef, self._state = graphlib.split(self._nodes, graph=self.graph)
    self._holders, self._treedef = self._flatten(self._state)
    self.values = [graphlib.as_pure(holder) for holder in self._holders]
    self.changed: set[int] = set()

  def _flatten(self, state):
    return jax.tree.flatten(
      state, is_leaf=lambda x: isinstance(x, variablelib.Variable)
    )

  def with_values(self, values):
    """Copies of the nodes: optimizer, model, args and kwargs."""
    nodes = graphlib.merge(self._graphdef, self._treedef.unflatten(values))
    leaves = list(self._leaves)
    for place, node in zip(self._places, nodes[2:]):
      leaves[place] = node
    args, kwargs = self._args_treedef.unflatten(leaves)
    return nodes, (nodes[0], nodes[1], args, kwargs)

  def values_of(self, nodes, before):
    """The values after a step, which must be of the kind they were before."""
    graphdef, state = graphlib.split(nodes, graph=self.graph)
    holders, treedef = self._flatten(state)
    if (graphdef, treedef) != (self._graphdef, self._treedef):
      old, new = (
        {path_str(path) for path, _ in statelib.to_flat_state(s)}
        for s in (self._state, state)
      )
      names = ', '.join(sorted(old ^ new)[:5]) or 'static attributes'
      raise ValueError(
        'minimize runs all steps in one compiled loop, so a step must not '
        f'change the structure of the model or optimizer, but it did: {names} '
        '(numbered 0 for the optimizer, 1 for the model). Remove `sow` from '
        'the loss, or write the loop with optimizer.value_and_update.'
      )
    values = [graphlib.as_pure(holder) for holder in holders]
    paths = [path for path, _ in statelib.to_flat_state(state)]
    for i, (path, old, new) in enumerate(zip(paths, before, values)):
      check_kind(path_str(path), old, new)
      if any(
        a is not b for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new))
      ):
        self.changed.add(i)
    return values

  def write(self, values):
    """Puts final values into the nodes, as far as they have changed."""
    holders = [self._holders[i] for i in sorted(self.changed)]
    new = [values[i] for i in sorted(self.changed)]
    if all(isinstance(x, variablelib.Variable) for x in holders):
      write_back.write(self._nodes, holders, new)
    else:
      state = self._treedef.unflatten(values)
      write_back.write(self._nodes, self._state, state)


def check_kind(name: str, old: tp.Any, new: tp.Any) -> None:
  """Checks that a loop can carry a value.

  Raises:
    ValueError: structure, shape or dtype of it has changed.
  """
  before, after = (
    jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)
    for tree in (old, new)
  )
  if before != after:
    raise ValueError(
      'minimize runs all steps in one compiled loop, so a step must not change '
      f'shapes or dtypes, but that of {name} changed from {before} to {after}. '
      'Cast it, or write the loop with optimizer.value_and_update.'
    )


def run(
  loss_fn, optimizer, model, args, kwargs, has_aux, max_steps, gtol, failures
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Makes steps until one has to stop.

  Returns:
    Loss and norm of its gradient at the final parameters, number of steps, and
    of line searches that failed since one did not.
  """
  nodes = _Nodes(optimizer, model, args, kwargs)
  params = graphlib.state(model, optimizer.wrt, graph=nodes.graph)
  if not jax.tree.leaves(params):
    raise ValueError(
      f'minimize has nothing to optimize: wrt={optimizer.wrt!r} of the '
      'optimizer selects no Variable of the model. Make the optimizer with a '
      'filter that does, such as nnx.Param.'
    )

  def parts(optimizer, model, args, kwargs):
    loss = evaluation.Loss(
      loss_fn, args, kwargs, has_aux=has_aux, graph=optimizer.graph
    )
    return loss, Snapshot(model, optimizer.wrt, graph=optimizer.graph)

  def evaluate(objects, reusing):
    loss, snapshot = parts(*objects)
    if reusing:
      result = reuse.evaluate_or_reuse(
        loss, snapshot, from_state=True,
        opt_state=graphlib.as_pure(objects[0].opt_state),
      )  # fmt: skip
    else:
      result = loss.evaluate(snapshot)
    return result._replace(aux=None, changed=()), result.changed

  first, changed = evaluate(nodes.with_values(nodes.values)[1], False)
  reusing = not (changed or first.arguments) and reuse.is_possible(
    optimizer, Snapshot(model, optimizer.wrt, graph=nodes.graph), first.value
  )
  if reusing:
    first = first._replace(params={}, rest={}, arguments={})
  has_info = isinstance(optimizer, LinesearchOptimizer)

  def step(carry):
    copies, objects = nodes.with_values(carry.values)
    loss, snapshot = parts(*objects)
    apply_evaluation(objects[0], objects[1], loss, snapshot, carry.pending)
    values = nodes.values_of(copies, carry.values)
    pending, _ = evaluate(nodes.with_values(values)[1], reusing)
    check_kind('the evaluation', carry.pending, pending)
    failures = carry.failures
    if has_info:
      failed = objects[0].linesearch_info.failed
      failures = jnp.where(failed, failures + 1, 0)
    return _Carry(values, pending, carry.num_steps + 1, failures)

  def goes_on(carry):
    grad_norm = optax.tree.norm(carry.pending.grads)
    return (
      (carry.num_steps < max_steps)
      & (grad_norm > gtol)
      & jnp.isfinite(grad_norm)
      & jnp.isfinite(carry.pending.value)
      & (carry.failures < MAX_FAILURES)
    )

  zero = jnp.zeros((), jnp.int32)
  last = jax.lax.while_loop(
    goes_on, step, _Carry(nodes.values, first, zero, jnp.asarray(failures))
  )
  nodes.write(last.values)
  grad_norm = optax.tree.norm(last.pending.grads)
  return last.pending.value, grad_norm, last.num_steps, last.failures
