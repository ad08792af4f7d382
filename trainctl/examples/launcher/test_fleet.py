"""Test of the launcher: the plans that it refuses."""

from pathlib import Path

from trainctl.config.registry import load_spec, new_section, trust_folder
from trainctl.config.schema import RunConfig

trust_folder(Path(__file__).parents[1] / "options")


def test_it_refuses_a_plan_for_more_machines_than_it_has() -> None:
    spec = load_spec("launcher", "fleet")
    section = new_section("launcher", "fleet", fleet_size=2)
    assert list(spec.reach(section, 2)) == []
    (problem,) = spec.reach(section, 3)
    assert (problem.key, problem.hint) == ("launcher.fleet_size", "launcher.fleet_size=3")
    section.fleet_name = "taken"
    (finding,) = spec.check_config(RunConfig(launcher=section), None)
    assert finding.key == "launcher.fleet_name"
