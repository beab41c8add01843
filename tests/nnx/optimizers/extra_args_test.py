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
"""``Optimizer.update`` against plain optax loops, for known extra arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import plain_optax
from absl.testing import absltest, parameterized

from flax import nnx

MODES = ((True, True), (True, False), (False, False))


class MLP(nnx.Module):
  def __init__(self, rngs):
    self.first = nnx.Linear(3, 4, rngs=rngs)
    self.second = nnx.Linear(4, 2, rngs=rngs)

  def __call__(self, x):
    return self.second(jnp.tanh(self.first(x)))


def l2_loss(model, inputs, targets):
  return jnp.mean((model(inputs) - targets) ** 2)


def fit(tx, num_steps, make_kwargs, mode=(True, True)):
  """Trains an MLP; returns losses, final parameters and the trace count."""
  graph, graph_updates = mode
  n = 0
  x, y = plain_optax.data()
  model = MLP(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param, graph=graph)

  @nnx.jit(graph=graph, graph_updates=graph_updates)
  def train_step(model, optimizer, x, y):
    nonlocal n
    n += 1
    loss, grads = nnx.value_and_grad(
      l2_loss, graph=graph, graph_updates=graph_updates
    )(model, x, y)
    optimizer.update(model, grads, **make_kwargs(loss, x, y))
    return loss

  losses = [float(train_step(model, optimizer, x, y)) for _ in range(num_steps)]
  return np.array(losses), plain_optax.mlp_params(model), n


def plain_fit(tx, num_steps, make_extra_args):
  x, y = plain_optax.data()
  return plain_optax.fit(
    tx,
    plain_optax.mlp_params(MLP(nnx.Rngs(0))),
    plain_optax.mlp_loss,
    num_steps,
    make_extra_args,
    step_args=(x, y),
  )


def linesearch_kwargs(value, x, y):
  return {'value': value, 'value_fn': lambda model: l2_loss(model, x, y)}


def plain_linesearch_kwargs(value, grad):
  x, y = plain_optax.data()
  return {
    'value': value,
    'grad': grad,
    'value_fn': lambda params: plain_optax.mlp_loss(params, x, y),
  }


class TestReportedProgram(absltest.TestCase):
  def test_losses_equal_plain_optax(self):
    x, y = plain_optax.data()
    batch = {'inputs': x, 'targets': y}
    tx = optax.chain(
      optax.sgd(1.0),
      optax.scale_by_backtracking_linesearch(max_backtracking_steps=10),
    )
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def train_step(model, optimizer, batch):
      loss, grads = nnx.value_and_grad(l2_loss)(
        model, batch['inputs'], batch['targets']
      )
      optimizer.update(
        model,
        grads,
        value=loss,
        value_fn=l2_loss,
        inputs=batch['inputs'],
        targets=batch['targets'],
      )
      return loss

    losses = [train_step(model, optimizer, batch) for _ in range(3)]
    jitted = nnx.jit(train_step)
    losses += [jitted(model, optimizer, batch) for _ in range(7)]

    expected, params = plain_fit(tx, 10, plain_linesearch_kwargs)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
      plain_optax.mlp_params(model),
      params,
    )
    self.assertLess(losses[-1], 0.5 * losses[0])


class TestEqualsPlainOptax(parameterized.TestCase):
  def check(self, tx, num_steps, make_kwargs, make_extra_args, mode):
    losses, params, n = fit(tx, num_steps, make_kwargs, mode)
    expected, expected_params = plain_fit(tx, num_steps, make_extra_args)

    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
      params,
      expected_params,
    )
    self.assertEqual(n, 1)
    self.assertLess(losses[-1], losses[0])

  @parameterized.product(
    name=(
      'lbfgs',
      'backtracking_store_grad',
      'multi_steps',
      'multi_steps_transformation',
      'apply_if_finite',
      'inject_hyperparams',
    ),
    mode=MODES,
  )
  def test_linesearch(self, name, mode):
    make = {
      'lbfgs': optax.lbfgs,
      'backtracking_store_grad': lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(
          max_backtracking_steps=10, store_grad=True
        )
      ),
      'multi_steps': lambda: optax.MultiSteps(optax.lbfgs(), 2),
      'multi_steps_transformation': lambda: optax.MultiSteps(
        optax.lbfgs(), 2
      ).gradient_transformation(),
      'apply_if_finite': lambda: optax.apply_if_finite(optax.lbfgs(), 3),
      'inject_hyperparams': lambda: optax.inject_hyperparams(
        optax.lbfgs, static_args=('memory_size', 'scale_init_precond')
      )(learning_rate=0.9),
    }
    self.check(
      make[name](), 5, linesearch_kwargs, plain_linesearch_kwargs, mode
    )

  @parameterized.parameters(*MODES)
  def test_polyak_sgd(self, *mode):
    self.check(
      optax.polyak_sgd(),
      5,
      lambda value, x, y: {'value': value},
      lambda value, grad: {'value': value},
      mode,
    )

  @parameterized.parameters(*MODES)
  def test_opaque_sam(self, *mode):
    graph, graph_updates = mode
    x, y = plain_optax.data()
    tx = optax.contrib.sam(
      optax.sgd(0.1),
      optax.chain(optax.contrib.normalize(), optax.sgd(0.05)),
      opaque_mode=True,
    )

    def make_kwargs(value, x, y):
      loss = lambda model: l2_loss(model, x, y)
      grad = nnx.grad(loss, graph=graph, graph_updates=graph_updates)
      return {'grad_fn': lambda model, i: grad(model)}

    def make_extra_args(value, grad):
      grad_fn = jax.grad(plain_optax.mlp_loss)
      return {'grad_fn': lambda params, i: grad_fn(params, x, y)}

    self.check(tx, 5, make_kwargs, make_extra_args, mode)
    # Nothing tells from the signature of a chain that SAM raises on ``grad``.
    self.check(
      optax.chain(tx, optax.identity()), 5, make_kwargs, make_extra_args, mode
    )

  @parameterized.parameters(*MODES)
  def test_sophia(self, *mode):
    x, y = plain_optax.data()
    # The signs that Sophia draws go by the order of leaves, which is the same
    # in a dict and in a State: sorted by path.
    self.check(
      optax.contrib.sophia(0.05, update_interval=2),
      5,
      lambda value, x, y: {'obj_fn': lambda model: l2_loss(model, x, y)},
      lambda value, grad: {
        'obj_fn': lambda params: plain_optax.mlp_loss(params, x, y)
      },
      mode,
    )


class TestSubclass(absltest.TestCase):
  def test_extra_args_is_the_hook(self):
    class SAM(nnx.Optimizer):
      def extra_args(self, model, grads, kwargs):
        grad_fn = lambda model, i: nnx.grad(kwargs['value_fn'])(model)
        return super().extra_args(model, grads, {'grad_fn': grad_fn})

    x, y = plain_optax.data()
    tx = optax.contrib.sam(
      optax.sgd(0.1),
      optax.chain(optax.contrib.normalize(), optax.sgd(0.05)),
      opaque_mode=True,
    )
    model = MLP(nnx.Rngs(0))
    optimizer = SAM(model, tx, wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer):
      loss_fn = lambda model: l2_loss(model, x, y)
      loss, grads = nnx.value_and_grad(loss_fn)(model)
      optimizer.update(model, grads, value_fn=loss_fn)
      return loss

    losses = [train_step(model, optimizer) for _ in range(4)]
    grad_fn = jax.grad(plain_optax.mlp_loss)
    expected, _ = plain_fit(
      tx, 4, lambda value, grad: {'grad_fn': lambda p, i: grad_fn(p, x, y)}
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


if __name__ == '__main__':
  absltest.main()
