import ast
import inspect
import pickle

import pytest

from knit.config import schema
from knit.config.keys import settings
from knit.config.limits import AT_LEAST, CHOICES, POSITIVE, SHARES
from knit.config.schema import KnitConf, SourceConf, seal


def test_every_setting_is_documented_beneath_it():
    undocumented = []
    for group in ast.parse(inspect.getsource(schema)).body:
        if isinstance(group, ast.ClassDef) and group.name.endswith("Conf"):
            for node, below in zip(group.body, [*group.body[1:], None], strict=True):
                documented = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                if isinstance(node, ast.AnnAssign) and not documented:
                    undocumented.append(f"{group.name}.{node.target.id}")
    assert undocumented == []


def test_limits_are_of_settings_that_exist():
    assert {*CHOICES, *AT_LEAST, *POSITIVE, *SHARES} <= set(settings())


def test_defaults_are_within_their_limits():
    from knit.config.resolved import resolve
    from knit.config.validate import VALUE_RULES

    conf = KnitConf()
    assert [line for rule in VALUE_RULES for line in rule(conf, resolve(conf))] == []


def test_a_sealed_configuration_cannot_be_written_to_not_even_in_another_process():
    conf = KnitConf(sources=[SourceConf(name="a")])
    conf.batch.size = 8
    for sealed in (seal(conf), pickle.loads(pickle.dumps(conf))):
        for group, name in ((sealed, "steps"), (sealed.batch, "size"), (sealed.sources[0], "ratio")):
            with pytest.raises(AttributeError, match=f"read-only: .*{name}"):
                setattr(group, name, 1)
