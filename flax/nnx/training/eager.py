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
"""Eager steps that compile once, not at every call.

Optax runs a line search in a ``jax.lax.while_loop``; called eagerly, with a new
function each time, it is traced and compiled each time. Here the whole step is
compiled, and used again as long as it means the same. Whatever cannot be
compiled, or may have changed unnoticed, runs as it is.
"""
from __future__ import annotations

import collections
import contextlib
import functools
import threading
import types
import typing as tp
import weakref

import jax
import jax.numpy as jnp

from flax.nnx import graphlib, tracers, variablelib
from flax.nnx.training import packing
from flax.nnx.training.captures import (
  NotConstant,
  key_of,
  key_of_modules,
  root_code,
)

# Compiled steps that are kept, the least recently used goes first.
MAX_COMPILED = 32
# Constants that change from call to call cost a compilation each; after so many
# in a row the same ones have to come twice.
MAX_MISSES = 3


class _Misses:
  """Calls of one piece of code in a row for which nothing was compiled."""

  def __init__(self):
    self.count = 0
    self.last = 0


# ``None`` where compiling failed and running did not.
_COMPILED: collections.OrderedDict[tp.Hashable, tp.Any]
_COMPILED = collections.OrderedDict()
_MISSES: weakref.WeakKeyDictionary[types.CodeType, _Misses]
_MISSES = weakref.WeakKeyDictionary()
# One of all transformations that mean the same, such as two optax.lbfgs().
_TRANSFORMATIONS: collections.OrderedDict[tp.Hashable, tp.Any]
_TRANSFORMATIONS = collections.OrderedDict()


@functools.cache
def _eager_trace() -> tp.Any:
  """The trace state outside of all transformations: that of a new thread."""
  found = []
  thread = threading.Thread(
    target=lambda: found.append(tracers.current_jax_trace())
  )
  thread.start()
  thread.join()
  return found[0]


def is_eager() -> bool:
  """Whether no transformation (jit, vmap, grad, scan, ...) is under way."""
  return tracers.current_jax_trace() == _eager_trace()


def _is_concrete(x: tp.Any) -> bool:
  if type(x) is _concrete_type():  # soon told
    return True
  return not (isinstance(x, jax.core.Tracer) or variablelib.is_array_ref(x))


@functools.cache
def _concrete_type() -> type:
  with jax.ensure_compile_time_eval():
    return type(jnp.zeros(()))


def _is_variable(x: tp.Any) -> bool:
  return isinstance(x, variablelib.Variable)


def _same(a: tp.Any, b: tp.Any) -> bool:
  old, new = jax.tree.leaves(a), jax.tree.leaves(b)
  return len(old) == len(new) and all(x is y for x, y in zip(old, new))


def _split(nodes, graph):
  graphdef, state = graphlib.split(nodes, graph=graph)
  holders, treedef = jax.tree.flatten(state, is_leaf=_is_variable)
  return graphdef, treedef, holders


@contextlib.contextmanager
def _shared_tx(optimizer: tp.Any) -> tp.Iterator[None]:
  """Gives optimizers with equal transformations one and the same ``tx``.

  Transformations are compared by identity, so that each new optimizer would
  be compiled anew.
  """
  tx = optimizer.tx
  try:
    key = key_of(tx)
    shared = _TRANSFORMATIONS.setdefault(key, tx)
  except (NotConstant, TypeError):
    yield
    return
  _TRANSFORMATIONS.move_to_end(key)
  if len(_TRANSFORMATIONS) > MAX_COMPILED:
    _TRANSFORMATIONS.popitem(last=False)
  vars(optimizer)['tx'] = shared
  try:
    yield
  finally:
    vars(optimizer)['tx'] = tx


def _run(function, graph, graphdef, treedefs, values, leaves):
  """The traced part: the step on copies of the Modules."""
  body, fn = function.value
  treedef, args_treedef = treedefs
  nodes = graphlib.merge(graphdef, treedef.unflatten(values))
  result = body(fn, *packing.put_together(nodes, leaves, args_treedef))
  new_graphdef, new_treedef, holders = _split(nodes, graph)
  new_values = graphlib.as_pure(holders)
  if (new_graphdef, new_treedef) != (graphdef, treedef) or (
    jax.tree.structure(new_values) != jax.tree.structure(values)
  ):
    raise packing.NotCompiled  # new Variables, other static attributes
  changed = {
    i: new
    for i, (old, new) in enumerate(zip(values, new_values))
    if not _same(old, new)
  }
  return packing.pack(result), changed


def _laid_out_as(new: jax.Array, old: jax.Array) -> jax.Array:
  """``new`` sharded as ``old`` was, of which the compiler knows nothing."""
  sharding = getattr(old, 'sharding', None)
  if sharding is None or len(sharding.device_set) == 1:
    return new
  if new.sharding.is_equivalent_to(sharding, new.ndim):
    return new
  return jax.device_put(new, sharding)


def _get(holder: variablelib.Variable) -> tp.Any:
  """Pure value of a Variable; the most frequent kind soon told."""
  raw = holder.get_raw_value()
  return raw if type(raw) is _concrete_type() else graphlib.as_pure(holder)


def _set(holder: variablelib.Variable, old: tp.Any, new: tp.Any) -> None:
  if type(old) is _concrete_type():
    holder.set_raw_value(_laid_out_as(new, old))
  else:
    graphlib.update(holder, jax.tree.map(_laid_out_as, new, old))


class Step:
  """A function of the user within a step of ours, compiled where it can be.

  Args:
    body: a module-level function ``body(fn, optimizer, *args)``, which may
      update Modules among its arguments.
    fn: function of the user that ``body`` calls.
    graph: graph mode in which Modules are taken apart.
    frozen: whether ``fn`` means the same in all calls of this object, whatever
      it captures.
  """

  def __init__(
    self,
    body: tp.Callable[..., tp.Any],
    fn: tp.Callable[..., tp.Any],
    *,
    graph: bool | None = None,
    frozen: bool = False,
  ):
    self._body = body
    self._fn = fn
    self._graph = graph
    self._frozen = frozen
    self._frozen_key: tp.Hashable = None
    self._cache: tp.Any = _COMPILED

  def __call__(self, optimizer: tp.Any, *args: tp.Any) -> tp.Any:
    """``body(fn, optimizer, *args)``, whatever it may be compiled to.

    Args:
      optimizer: the optimizer.
      *args: pytrees of Modules, arrays, and other objects; those stay the
        Python objects that they are.
    """
    call = None
    if is_eager() and not jax.config.jax_disable_jit:
      with contextlib.suppress(
        packing.NotCompiled, NotConstant, TypeError, ValueError, RecursionError
      ):
        call = self._prepare(optimizer, args)
    if call is None:
      return self._body(self._fn, optimizer, *args)
    variant, run = call
    try:
      return run()
    except Exception:
      pass  # if it is a mistake in the loss, it shows up below
    result = self._body(self._fn, optimizer, *args)
    if variant in self._cache:
      self._cache[variant] = None
    return result

  def _prepare(self, optimizer, args):
    """What identifies a call, and a function that makes it."""
    nodes, leaves, args_treedef = packing.take_apart((optimizer, *args))
    function = packing.Constant((self._body, self._fn), self._key(nodes))
    with _shared_tx(optimizer):
      graphdef, treedef, holders = _split(nodes, self._graph)
    if not all(map(_is_variable, holders)):
      raise packing.NotCompiled
    values = [_get(holder) for holder in holders]
    if not all(
      map(_is_concrete, jax.tree.leaves((values, leaves)))
    ):
      raise packing.NotCompiled
    constants = tuple(x for x in leaves if isinstance(x, packing.Constant))
    variant = (function, constants, graphdef)
    jitted = self._jitted(variant)

    def run():
      result, changed = jitted(
        function, self._graph, graphdef, (treedef, args_treedef), values, leaves
      )
      for i, new in changed.items():
        _set(holders[i], values[i], new)
      return packing.unpack(result)

    return variant, run

  def _key(self, nodes: tp.Any) -> tp.Hashable:
    if self._frozen and self._frozen_key is not None:
      return self._frozen_key
    try:
      key = self._body, key_of(self._fn), key_of_modules(nodes)
    except NotConstant:
      if not self._frozen:
        raise
      # Meant for this object alone, so that it may not be found by another.
      self._cache = collections.OrderedDict()
      key = self._body, None
    self._frozen_key = key
    return key

  def _jitted(self, variant: tp.Hashable) -> tp.Any:
    """The compiled function for a variant, or a new one to be compiled."""
    if variant not in self._cache:
      self._count_miss(variant)
      # A partial of its own, so that what it compiles goes along with it.
      self._cache[variant] = jax.jit(
        functools.partial(_run), static_argnums=(0, 1, 2, 3)
      )
      if len(self._cache) > MAX_COMPILED:
        self._cache.popitem(last=False)
    elif not self._frozen:
      _MISSES.pop(root_code(self._fn), None)
    self._cache.move_to_end(variant)
    if self._cache[variant] is None:
      raise packing.NotCompiled
    return self._cache[variant]

  def _count_miss(self, variant: tp.Hashable) -> None:
    if self._frozen:
      return
    misses = _MISSES.setdefault(root_code(self._fn), _Misses())
    misses.count += 1
    if misses.count > MAX_MISSES and misses.last != hash(variant):
      misses.last = hash(variant)
      raise packing.NotCompiled
