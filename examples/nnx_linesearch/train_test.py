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
"""The example learns with each of its optimizers and draws what happened."""

import importlib.util
import io
import pathlib
import tempfile
from contextlib import redirect_stderr, redirect_stdout

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from matplotlib import image

from flax import nnx

SPEC = importlib.util.spec_from_file_location(
  'nnx_linesearch_train', pathlib.Path(__file__).with_name('train.py')
)
train = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(train)


class TestTrain(parameterized.TestCase):
  def run_main(self, *argv):
    """Returns the curves, what was printed, and the picture."""
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / 'curves.png'
      printed = io.StringIO()
      with redirect_stdout(printed):
        curves = train.main([*argv, '--plot', str(path)])
      return curves, printed.getvalue(), image.imread(path)

  def test_default_classifies_digits(self):
    curves, printed, picture = self.run_main()

    self.assertGreaterEqual(curves['accuracy'][-1], 0.97)
    self.assertLess(curves['loss'][-1], 0.1)
    self.assertIn(f"{curves['accuracy'][-1]:.2%}", printed)
    self.assertIn('330', printed)  # 30 epochs of 11 batches
    rates = np.array(curves['learning_rate'])
    self.assertLen(rates, 330)
    self.assertGreater(len(np.unique(rates)), 1)  # it searched
    self.assertLessEqual(rates.max(), 1.0)
    # Something is drawn: not all pixels are alike.
    self.assertGreater(picture.std(), 0.05)

  @parameterized.parameters(
    ('adam', 5, ('--batch-size', '256')), ('lbfgs', 12, ())
  )
  def test_other_optimizers_learn(self, name, epochs, options):
    curves, printed, picture = self.run_main(
      '--optimizer', name, '--epochs', str(epochs), '--seed', '1', *options
    )

    self.assertLen(curves['loss'], epochs)
    self.assertLess(curves['loss'][-1], 0.5 * curves['loss'][0])
    self.assertIn(name, printed)
    self.assertGreater(picture.std(), 0.05)

  def test_seed_decides(self):
    options = ('--optimizer', 'adam', '--epochs', '1', '--seed')
    first, again, other = (
      self.run_main(*options, seed)[0]['loss'] for seed in '334'
    )

    self.assertEqual(first, again)
    self.assertNotEqual(first, other)

  def test_evaluation_leaves_model_alone(self):
    model = train.CNN(0.5, rngs=nnx.Rngs(0))
    model.eval()
    images, labels = jnp.ones((4, 8, 8, 1)), jnp.arange(4)
    before = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey)))

    train.accuracy(model, images, labels)

    after = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey)))
    np.testing.assert_array_equal(
      before['norm1']['mean'], after['norm1']['mean']
    )
    np.testing.assert_array_equal(
      before['dropout']['rngs']['count'], after['dropout']['rngs']['count']
    )

  @parameterized.parameters('0', '-1', 'many')
  def test_number_of_epochs_error(self, epochs):
    message = io.StringIO()
    with redirect_stderr(message), self.assertRaises(SystemExit):
      train.main(['--epochs', epochs])

    self.assertIn('--epochs', message.getvalue())


if __name__ == '__main__':
  absltest.main()
