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
"""A transformation that records what optax callbacks receive and return."""

import jax
import jax.numpy as jnp

from flax import nnx


class Probe:
  """A transformation that calls ``fn`` with candidate parameters, twice."""

  def __init__(self):
    self.results = []

  def init(self, params):
    return ()

  def update(self, updates, state, params, *, fn=None, candidate=None, **rest):
    candidate = candidate or (lambda p: jax.tree.map(lambda x: x + 1, p))
    for _ in range(2):
      self.results.append(fn(candidate(params), **rest))
    return jax.tree.map(jnp.zeros_like, updates), state


def probe(fn, model=None, *, wrt=nnx.Param, graph=None, **kwargs):
  """What ``fn`` returned for parameters that are 1 larger."""
  model = model or nnx.Linear(2, 3, rngs=nnx.Rngs(0))
  tx = Probe()
  optimizer = nnx.Optimizer(model, tx, wrt=wrt, graph=graph)
  grads = jax.tree.map(jnp.zeros_like, nnx.state(model, wrt, graph=graph))
  optimizer.update(model, grads, fn=fn, **kwargs)
  return tx.results
