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
"""What a function captures, as a key that tells whether it has changed.

A compiled function keeps the values that it read while it was traced. It may
stand in for the function itself only as long as those are the same: closure
variables, defaults, and the globals that it and the user's functions called by
it name. The code of installed packages, classes and modules counts as constant.
"""
from __future__ import annotations

import dis
import enum
import functools
import hashlib
import types
import typing as tp
import weakref

import jax
import numpy as np

from flax.nnx import variablelib
from flax.nnx.training.snapshot import is_stateful

_CONSTANTS = (
  type(None), bool, int, float, complex, str, bytes, type, enum.Enum,
  types.ModuleType, types.BuiltinFunctionType, np.dtype, np.ufunc, np.generic,
  type(Ellipsis),
)  # fmt: skip
_LIBRARIES = frozenset({'flax', 'jax', 'jaxlib', 'numpy', 'optax'})
_MAX_BYTES = 1 << 22  # of a NumPy array; hashing more takes milliseconds


class NotConstant(Exception):
  """Something captured may change without notice."""


class Same:
  """Key of an object that equals nothing but the very same object."""

  def __init__(self, x: tp.Any):
    self._x = x  # kept, so that its id is not used again

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Same) and self._x is other._x

  def __hash__(self) -> int:
    return id(self._x)


def key_of(x: tp.Any) -> tp.Hashable:
  """A key that equals an earlier one only if ``x`` means the same as then.

  Args:
    x: a function, an array, a constant, or a pytree of such.

  Raises:
    NotConstant: ``x`` holds something that can change in place.
  """
  return _key(x, {})


def root_code(fn: tp.Any) -> types.CodeType:
  """The code behind a function, a partial or a jitted function.

  Raises:
    NotConstant: there is none, or it is of a method.
  """
  while not isinstance(fn, types.FunctionType):
    inner = getattr(fn, 'func', None) or getattr(fn, '__wrapped__', None)
    if inner is None or isinstance(fn, types.MethodType):
      raise NotConstant(f'{fn!r} is not a function')
    fn = inner
  return fn.__code__


def _key(x: tp.Any, seen: dict[int, int]) -> tp.Hashable:
  if isinstance(x, _CONSTANTS):
    return type(x), x
  if isinstance(x, jax.Array) and not variablelib.is_array_ref(x):
    return Same(x)
  if type(x) is object:  # a sentinel
    return Same(x)
  if isinstance(x, np.ndarray):
    return _ndarray_key(x)
  if callable(x) and not is_stateful(x):
    # Functions may refer to each other, and to themselves.
    if id(x) in seen:
      return 'seen', seen[id(x)]
    seen[id(x)] = len(seen)
    return _callable_key(x, seen)
  if isinstance(x, (set, frozenset)):
    return type(x), frozenset(_key(item, seen) for item in x)
  return _pytree_key(x, seen)


def _ndarray_key(x: np.ndarray) -> tp.Hashable:
  if x.dtype.hasobject or x.nbytes > _MAX_BYTES:
    raise NotConstant(f'NumPy array of dtype {x.dtype}, {x.nbytes} bytes')
  digest = hashlib.blake2b(np.ascontiguousarray(x).tobytes()).digest()
  return np.ndarray, x.shape, x.dtype, digest


def _pytree_key(x: tp.Any, seen: dict[int, int]) -> tp.Hashable:
  if is_stateful(x):
    raise NotConstant(f'{type(x).__name__} holds Variables')
  try:
    children, treedef = jax.tree.flatten(x, is_leaf=lambda y: y is not x)
    hash(treedef)
  except Exception as error:
    raise NotConstant(f'{type(x).__name__} is no pytree') from error
  if children and children[0] is x:
    raise NotConstant(f'{type(x).__name__} may change')
  return treedef, tuple(_key(child, seen) for child in children)


def _callable_key(x: tp.Any, seen: dict[int, int]) -> tp.Hashable:
  if isinstance(x, functools.partial):
    return 'partial', *(
      _key(part, seen) for part in (x.func, x.args, x.keywords)
    )
  if isinstance(x, types.FunctionType):
    return _function_key(x, seen)
  if isinstance(x, types.MethodType) and isinstance(x.__self__, type):
    return x.__self__, _key(x.__func__, seen)
  wrapped = getattr(x, '__wrapped__', None)
  if wrapped is None or isinstance(x, types.MethodType):
    raise NotConstant(f'{type(x).__name__} is no function')
  return Same(x), _key(wrapped, seen)  # jax.jit, jax.custom_vjp, ...


def _is_library(fn: types.FunctionType) -> bool:
  package = (fn.__module__ or '').split('.')[0]
  return package in _LIBRARIES or 'site-packages' in fn.__code__.co_filename


def _function_key(fn: types.FunctionType, seen: dict[int, int]) -> tp.Hashable:
  names: list[str] = []
  captured: list[tp.Any] = []
  if not _is_library(fn):
    names = [n for n in _global_names(fn.__code__) if n in fn.__globals__]
    captured += [fn.__globals__[name] for name in names]
    captured += [fn.__defaults__, fn.__kwdefaults__]
  # A wrapper that a library made holds the user's function in its closure.
  for cell in fn.__closure__ or ():
    try:
      captured.append(cell.cell_contents)
    except ValueError:  # not assigned yet
      captured.append(None)
  owner = fn.__code__ if fn.__closure__ or captured else Same(fn)
  return owner, tuple(names), tuple(_key(part, seen) for part in captured)


_NAMES: weakref.WeakKeyDictionary[types.CodeType, tuple[str, ...]]
_NAMES = weakref.WeakKeyDictionary()


def _global_names(code: types.CodeType) -> tuple[str, ...]:
  """Names of globals that ``code``, and functions defined in it, refer to."""
  if code not in _NAMES:
    names = {
      instruction.argval
      for instruction in dis.get_instructions(code)
      if instruction.opname in ('LOAD_GLOBAL', 'LOAD_NAME')
    }
    for const in code.co_consts:
      if isinstance(const, types.CodeType):
        names.update(_global_names(const))
    _NAMES[code] = tuple(sorted(names))
  return _NAMES[code]
