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
"""Plain JAX and optax training loops, to compare ``nnx.Optimizer`` with."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax


def data(num_examples=16, num_inputs=3, num_outputs=2, seed=0):
  """A linear regression problem with noise, as NumPy arrays."""
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(num_examples, num_inputs)).astype(np.float32)
  w = rng.normal(size=(num_inputs, num_outputs)).astype(np.float32)
  y = x @ w + 0.1 * rng.normal(size=(num_examples, num_outputs))
  return x, y.astype(np.float32)


def mlp_params(model):
  """The arrays of an MLP with layers ``first`` and ``second``, as a dict."""
  return {
    layer: {
      'kernel': jnp.array(getattr(model, layer).kernel[...]),
      'bias': jnp.array(getattr(model, layer).bias[...]),
    }
    for layer in ('first', 'second')
  }


def mlp_loss(params, inputs, targets):
  """Mean squared error of the MLP, written without Flax."""
  first, second = params['first'], params['second']
  h = jnp.tanh(inputs @ first['kernel'] + first['bias'][None])
  out = h @ second['kernel'] + second['bias'][None]
  return jnp.mean((out - targets) ** 2)


def fit(tx, params, loss_fn, num_steps, make_extra_args=None, step_args=()):
  """Runs ``num_steps`` jitted updates of ``tx``, the way optax documents it.

  Args:
    tx: an optax transformation.
    params: tree of arrays.
    loss_fn: function of the parameters and of ``step_args``.
    num_steps: number of updates.
    make_extra_args: from (value, grad) to the extra arguments of ``tx.update``;
      only those that the signature allows are passed.
    step_args: further arguments of ``loss_fn``, the same in each step.

  Returns:
    The losses before each update, and the final parameters.
  """
  parameters = inspect.signature(tx.update).parameters.values()
  takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
  names = {p.name for p in parameters}

  @jax.jit
  def step(params, opt_state):
    value, grad = jax.value_and_grad(loss_fn)(params, *step_args)
    extra = make_extra_args(value, grad) if make_extra_args else {}
    extra = {k: v for k, v in extra.items() if takes_any or k in names}
    updates, opt_state = tx.update(grad, opt_state, params, **extra)
    return optax.apply_updates(params, updates), opt_state, value

  opt_state = tx.init(params)
  losses = []
  for _ in range(num_steps):
    params, opt_state, value = step(params, opt_state)
    losses.append(float(value))
  return np.array(losses), params
