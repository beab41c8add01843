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
"""Messages say what was wrong, where, and the remedy; nothing is changed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from absl.testing import absltest, parameterized

from flax import nnx

LINESEARCH = optax.chain(
  optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)
)


def loss_fn(model):
  return (model(jnp.ones((2, 2))) ** 2).mean()


class TestUpdateErrors(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))

  def check(
    self, error, pattern, *args, tx=LINESEARCH, wrt=nnx.Param, **kwargs
  ):
    """Checks message and remedy, eagerly and jitted, and that nothing moved."""
    optimizer = nnx.Optimizer(self.model, tx, wrt=wrt)
    read = lambda: jax.tree.map(
      np.array, nnx.as_pure(nnx.state((self.model, optimizer)))
    )
    before = read()
    step = lambda model, optimizer: optimizer.update(model, *args, **kwargs)
    for f in (step, nnx.jit(step)):
      with self.assertRaisesRegex(error, f'(?s){pattern}'):
        f(self.model, optimizer)
    jax.tree.map(np.testing.assert_array_equal, read(), before)

  @property
  def grads(self):
    return nnx.grad(loss_fn)(self.model)

  @parameterized.parameters(
    ({'value_fn': loss_fn}, 'needs value, not given'),
    ({'value': 1.0}, 'needs value_fn, not given'),
    ({}, 'needs value and value_fn, not given'),
    ({'value': None, 'value_fn': loss_fn}, 'needs value, not given'),
  )
  def test_linesearch_without_loss_error(self, kwargs, message):
    remedy = r'optimizer\.update\(model, grads, value=loss, value_fn='
    self.check(TypeError, f'{message}.*{remedy}', self.grads, **kwargs)
    for tx in (optax.lbfgs(), optax.MultiSteps(optax.lbfgs(), 2)):
      self.check(TypeError, message, self.grads, tx=tx, **kwargs)

  @parameterized.parameters(
    (1, TypeError, 'floating-point scalar, but its dtype is int'),
    (jnp.array(True), TypeError, 'floating-point scalar, but its dtype is b'),
    (jnp.ones(3), ValueError, r'scalar, but it has shape \(3,\).*jnp\.mean'),
  )
  def test_value_error(self, value, error, message):
    self.check(error, message, self.grads, value=value, value_fn=loss_fn)

  @parameterized.parameters(
    (
      lambda m: (loss_fn(m), {'aux': 0}),
      TypeError,
      r'`value_fn` must return.*a tuple of 2.*loss_fn\(model, \.\.\.\)\[0\]',
    ),
    (
      lambda m: m(jnp.ones((2, 2))),
      ValueError,
      r'array of shape \(2, 3\).*jnp\.mean',
    ),
    (lambda m: 3, TypeError, 'returned dtype int'),
    (lambda m: None, TypeError, 'returned NoneType'),
    (lambda m: loss_fn(m) * 1j, TypeError, 'returned dtype complex'),
  )
  def test_value_fn_result_error(self, value_fn, error, message):
    for tx in (LINESEARCH, optax.lbfgs()):
      self.check(
        error, message, self.grads, tx=tx, value=1.0, value_fn=value_fn
      )

  def test_obj_fn_result_error(self):
    self.check(
      TypeError, '`obj_fn` must return', self.grads,
      tx=optax.contrib.sophia(0.1), obj_fn=lambda m: (loss_fn(m), 0),
    )

  def test_error_in_value_fn_is_the_users_error(self):
    self.check(
      AttributeError, 'kernl', self.grads, value=1.0,
      value_fn=lambda m: m.kernl[...].sum(),
    )

  def test_grads_missing_error(self):
    self.check(TypeError, 'Missing required argument `grads`')

  @parameterized.parameters(
    ('none', 2, r'bias, kernel'),
    ('empty', 2, r'bias, kernel'),
    ('array', 2, r'bias, kernel'),
    ('partial', 1, r'bias\.'),
  )
  def test_incomplete_grads_error(self, form, count, paths):
    grads = {
      'none': None,
      'empty': {},
      'array': jnp.ones(3),
      'partial': {'kernel': jnp.ones((2, 3))},
    }[form]
    message = (
      rf'`grads` has no entry for {count} of the 2 parameters.*{paths}.*'
      r'nnx\.DiffState\(0, optimizer\.wrt\)'
    )
    self.check(ValueError, message, grads, tx=optax.adam(0.1))

  def test_grads_of_another_filter_error(self):
    base = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    self.model = nnx.LoRA(2, 1, 3, base_module=base, rngs=nnx.Rngs(1))
    diff = nnx.DiffState(0, nnx.LoRAParam)
    grads = nnx.grad(loss_fn, argnums=diff)(self.model)
    self.check(
      ValueError, r'2 of the 4 parameters.*base_module\.bias, base_module',
      grads, tx=optax.adam(0.1),
    )

  def test_grad_argument_error(self):
    self.check(
      ValueError, '`grad` has no entry for 1 of', self.grads, value=1.0,
      value_fn=loss_fn, grad={'bias': jnp.ones(3)},
    )

  def test_grads_of_another_shape_error(self):
    grads = {'kernel': jnp.ones((2, 3)), 'bias': jnp.ones((5, 3))}
    with jax.numpy_rank_promotion('allow'):
      self.check(
        ValueError, r'update of bias.*from \(3,\) to \(5, 3\).*own shapes',
        grads, tx=optax.sgd(0.1),
      )

  def test_wrt_missing_error(self):
    with self.assertRaisesRegex(TypeError, 'Missing required argument `wrt`'):
      nnx.Optimizer(self.model, optax.adam(0.1))

  def test_model_attribute_error(self):
    optimizer = nnx.Optimizer(self.model, optax.adam(0.1), wrt=nnx.Param)
    with self.assertRaisesRegex(
      AttributeError, "does not have attribute 'model'.*ModelAndOptimizer"
    ):
      _ = optimizer.model
    self.assertFalse(hasattr(optimizer, 'no_such_name'))


class TestAcceptedGrads(parameterized.TestCase):
  @parameterized.parameters('state', 'arrays', 'dict', 'numpy', 'module')
  def test_forms(self, form):
    def train(form):
      model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
      grads = nnx.grad(loss_fn)(model)
      if form == 'module':
        grads = nnx.grad(loss_fn, graph=False)(model)
      elif form != 'state':
        grads = nnx.as_pure(grads)
      if form in ('dict', 'numpy'):
        grads = nnx.to_pure_dict(grads)
      if form == 'numpy':
        grads = jax.tree.map(np.asarray, grads)
      updates = optimizer.update(model, grads)
      return updates, nnx.as_pure(nnx.state(model))

    jax.tree.map(np.testing.assert_array_equal, train(form), train('state'))

  def test_keyword(self):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    bias = jnp.copy(model.bias[...])
    optimizer.update(model, grads=jax.tree.map(jnp.ones_like, nnx.state(model)))
    np.testing.assert_allclose(model.bias, bias - 1.0)


if __name__ == '__main__':
  absltest.main()
