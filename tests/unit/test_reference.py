"""What is published from the code is what the code is, and holds up to the standards that it names."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from control.metrics import ControlCollector, Figures
from gateway.metrics import Metrics
from scripts import reference
from tests.support.paths import CHECKOUT

PROMETHEUS = CHECKOUT / "docs/prometheus"


@pytest.mark.parametrize("name", reference.FILES)
def test_a_published_file_is_what_the_code_says(name: str) -> None:
    assert (reference.FOLDER / name).read_text() == reference.FILES[name](), "run `python -m scripts.reference`"


def test_the_api_is_described_by_valid_openapi_3_1() -> None:
    document: dict[str, Any] = json.loads(reference.openapi())
    OpenAPIV31SpecValidator(document).validate()
    kinds = {operation["operationId"] for methods in document["paths"].values() for operation in methods.values()}
    assert len(kinds) == sum(len(methods) for methods in document["paths"].values())


def test_the_runner_protocols_schema_takes_its_frames_and_refuses_others() -> None:
    from jsonschema import Draft202012Validator

    schema = json.loads(reference.runner_protocol())
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    assert validator.is_valid({"type": "hello", "version": 1, "instance": "i"})
    assert not validator.is_valid({"type": "hello", "version": 1})
    assert not validator.is_valid({"type": "surprise"})


def test_alerts_speak_of_metrics_that_exist() -> None:
    figures = Figures({}, 0, 0, 0, False, 0)
    families = [*Metrics().collect(), *ControlCollector(lambda: figures).collect()]
    known = {family.name for family in families}
    text = (PROMETHEUS / "alerts.yml").read_text()
    for name in set(re.findall(r"opificia_(?:gateway|control)_[a-z_]+", text)):
        assert re.sub(r"_(?:total|bucket)$", "", name) in known, name


def test_prometheus_loads_the_scrape_configuration_and_the_alerts(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        print("skipped: there is no promtool (Debian package prometheus)")
        pytest.skip("there is no promtool (Debian package prometheus)")
    shutil.copytree(PROMETHEUS, tmp_path / "prometheus")
    for arguments in (
        ("check", "config", "--syntax-only", str(tmp_path / "prometheus/prometheus.yml")),
        ("check", "rules", str(tmp_path / "prometheus/alerts.yml")),
    ):
        done = subprocess.run([promtool, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
