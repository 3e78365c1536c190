"""Fleet files: what they say, and of what is wrong the line."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError
from ray import serve

from motley.cluster.fleet.control.backend.planned_fleet import plan_from_spec
from motley.cluster.fleet.control.reconciler.policy_selection import make_policy
from motley.cluster.fleet.scaling.policy_registry import POLICIES
from motley.cluster.fleet.spec import fleet_schema
from motley.cluster.fleet.spec.engine_spec import ENGINE_NAMES, EngineSpec
from motley.cluster.fleet.spec.fleet_file_loader import load_fleet
from motley.cluster.fleet.spec.fleet_spec import FleetSpec, engine_config
from motley.cluster.fleet.spec.pool_spec import ReplicaRange
from motley.cluster.fleet.spec.ray_placement import ACCELERATOR, placement_options
from motley.cluster.fleet.spec.scaling_spec import ScalingSpec
from motley.cluster.service.deployment import serve_app
from motley.cluster.service_errors import ConfigurationError
from motley.replicas.engine_config import EngineConfig
from motley.replicas.simulated.simulated_device import RooflineShares
from motley.replicas.types import PROFILED_BATCH_SIZES

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
EXAMPLES = sorted((DEPLOY / "examples").glob("*.yaml"))
GPU = {"num_cpus": 1.0, "num_gpus": 1}
HEAD = "model: demo\npools:\n  - name: a\n"


def load(folder: Path, text: str) -> FleetSpec:
    file = folder / "fleet.yaml"
    file.write_text(text)
    return load_fleet(file).spec


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_fleets_by_the_schema_too(path: Path) -> None:
    spec = load_fleet(path).spec
    assert FleetSpec.model_validate_json(spec.model_dump_json()) == spec
    jsonschema.validate(yaml.safe_load(path.read_text()), fleet_schema.fleet_schema(), jsonschema.Draft202012Validator)


def test_the_examples_are_found() -> None:
    assert {path.stem for path in EXAMPLES} >= {"laptop", "mixed"}


def test_the_schema_is_as_generated() -> None:
    assert fleet_schema.FILE == DEPLOY / "fleet.schema.json"
    assert fleet_schema.FILE.read_text() == fleet_schema.schema_text(), "run `make schema`"
    jsonschema.Draft202012Validator.check_schema(json.loads(fleet_schema.FILE.read_text()))


@pytest.mark.parametrize(
    ("more", "place", "told"),
    [
        ("    replica: 3\n", "4:5", "pools[0].replica: there is no such entry; did you mean replicas?"),
        ("tenant: {}\n", "4:1", "tenant: there is no such entry; did you mean tenants?"),
        ("    engine: {sorcery: 1}\n", "4:14", "pools[0].engine.sorcery: there is no such entry; there are drafter"),
        ("    name: b\n", "4:5", "pools[0].name: it is there twice, first in line 3"),
        ("  - name: a\n", "4:11", "pools[1].name: 'a' is the name of another pool already"),
        ("  - cpus: 1\n", "4:5", "pools[1].name: it is missing"),
        ("  - name: A_\n", "4:11", "pools[1].name: 'A_' is not accepted; expected lower-case letters, digits and"),
        ("  - name: ingress\n", "4:11", "it is the name of another part of the service"),
        ("    replicas: 0\n", "4:15", "pools[0].replicas.max: 0 is not accepted; expected at least 1"),
        ("    replicas: yes\n", "4:15", "pools[0].replicas: True is not accepted"),
        ("    replicas: 1.5\n", "4:15", "pools[0].replicas: 1.5 is not accepted; expected a whole number, or entries"),
        ("    quantization: {model: ''}\n", "4:27", "'' is not accepted; expected at least 1 character"),
        ("    replicas: {min: 2, max: 1}\n", "4:29", "pools[0].replicas.max: 1 is not accepted; expected at least min"),
        ("    replicas: {min: 2, start: 1}\n", "4:31", "pools[0].replicas.start: 1 is not accepted; expected min to"),
        ("    replicas: {min: 0, start: 0}\n", "4:15", "expected one to start with"),
        ("    replicas: {max: x}\n", "4:21", "pools[0].replicas.max: 'x' is not accepted; expected an integer"),
        ("    engine: {kv_memory: 3 tons}\n", "4:25", "'3 tons' is no size; expected one such as 512MiB"),
        ("    engine: {max_batch_tokens: 3}\n", "4:32", "3 is not accepted; expected at least max_running (64)"),
        ("    engine: {speculate_ngram: 99}\n", "4:31", "99 is not accepted; expected an integer from 0 to 32"),
        ("    engine: {drafter: medusa}\n", "4:23", "'medusa' is not accepted; expected 'ngram'"),
        ("    simulate: Voodoo 2\n", "4:15", "pools[0].simulate: 'Voodoo 2' is not in the table; expected one of Te"),
        ("    simulate: P40\n    simulate_model: gpt\n", "5:21", "'gpt' is not a simulated model; expected one of "),
        ("    simulate_model: qwen2.5-7b\n", "4:21", "it needs `simulate`, which names a GPU"),
        ("    measured: t4.json\n", "4:15", "it needs `simulate`, which names a GPU"),
        ("    attained: {}\n", "4:15", "it needs `simulate`, which names a GPU"),
        ("    simulate: T4\n    measured: a\n    attained: {}\n", "6:15", "one or the other"),
        ("    simulate: T4\n    attained: {bandwidth: 0}\n", "5:27", "0 is not accepted; expected at least 0.0001"),
        ("    simulate: T4\n    measured: none.json\n", "5:15", "none.json: No such file"),
        ("    simulate: T4\n    measured: fleet.yaml\n", "5:15", "fleet.yaml:1: not valid JSON"),
        ("    hidden: {share: 0.1}\n", "4:13", "it needs `simulate`, which names a GPU"),
        ("    simulate: P40\n    accelerator: P40\n", "5:18", "a simulated GPU is computed on a CPU"),
        ("    tensor_parallel: 2\n    simulate: P40\n", "4:22", "simulated GPUs have no ranks"),
        ("    tensor_parallel: 0\n", "4:22", "expected at least 1"),
        ("    pipeline_parallel: 0\n", "4:24", "expected at least 1"),
        ("    pipeline_layers: [6, 18]\n", "4:22", "[6, 18] is not accepted; expected a number for each of 1 stages"),
        ("    pipeline_parallel: 2\n    pipeline_layers: [0, 9]\n", "5:23", "expected at least 1"),
        ("    bundles: [{cpus: 1}]\n", "4:14", "expected `tensor_parallel` or `pipeline_parallel` above 1"),
        ("    tensor_parallel: 2\n    bundles: [{cpus: 1}]\n", "5:14", "1 are not accepted; expected one for each"),
        ("    tensor_parallel: 2\n    bundles: [{}, {cpus: 0}]\n", "5:26", "0 is not accepted; expected at least"),
        ("    tensor_parallel: 2\n    bundles: [{cpus: 1}, {gpus: 1}]\n", "5:27", "bundles[1].gpus: there is no such"),
        ("    tensor_parallel: 2\n    cpus: 2\n    bundles: [{}, {}]\n", "5:11", "it is not accepted beside `bundles`"),
        ("    strategy: STRICT_PACK\n", "4:15", "it needs `bundles`, and there are none"),
        (
            "    tensor_parallel: 2\n    device: cuda:1\n    bundles: [{}, {}]\n",
            "5:13",
            "'cuda:1' is not accepted with `bundles`; expected cuda",
        ),
        ("    device: cpu,cuda\n", "4:13", "'cpu,cuda' is not accepted; expected one, or one for each of 1 stages"),
        ("    compute_capability: 5.0\n", "4:25", "'5.0' is not accepted; there are kernels for 6.0, 6.1, 7.0"),
        ("    compute_capability: new\n", "4:25", "'new' is not accepted; expected one such as 7.5 or >=8.0"),
        ("    device: cpu\n    accelerator: T4\n", "4:13", "the pool asks for a kind of GPU; expected cuda"),
        ("    labels: {spot: true}\n", "4:20", "pools[0].labels.spot: True is not accepted; expected text"),
        ("    labels: {'a b': c}\n", "4:14", "expected the name of a label"),
        ("    labels: {a: in(b}\n", "4:17", "expected a label's value such as T4, in(T4, L4) or !T4"),
        ("slo: {ttft_ms: -1, tpot_ms: 1}\n", "4:16", "slo.ttft_ms: -1 is not accepted; expected at least 0.001"),
        ("slo: {ttft_ms: 1.0e+9, tpot_ms: 1}\n", "4:16", "1000000000.0 is not accepted; expected at most 3600000"),
        ("slo: {ttft_ms: 1, tpot_ms: 3600001}\n", "4:28", "slo.tpot_ms: 3600001 is not accepted; expected at most"),
        ("slo: {ttft_ms: .nan, tpot_ms: 3}\n", "4:16", "slo.ttft_ms: nan is not accepted; expected a finite number"),
        ("slo: {ttft_ms: 1}\n", "4:6", "slo.tpot_ms: it is missing"),
        ("scaling: {policy: auto}\n", "4:19", "'auto' is not accepted; expected 'fixed', 'queue' or 'slo'"),
        ("scaling: {policy: queue, headroom: 1}\n", "4:36", "policy 'queue' has no such setting; slo has"),
        ("scaling: {running: 2}\n", "4:20", "the policy 'fixed' has no such setting; queue has"),
        ("listen: {http_port: 99999}\n", "4:21", "99999 is not accepted; expected at most 65535"),
        ("security: {api_keys: 3}\n", "4:22", "security.api_keys: 3 is not accepted"),
        ("tenants: {1: {}}\n", "4:11", "tenants.1: 1 is not accepted; expected text"),
        ("prefix_cache: {wire: float64}\n", "4:22", "'float64' is not accepted; expected 'auto', 'int8', 'float16' or"),
        ("prefix_cache: {any_numerics: 1}\n", "4:30", "1 is not accepted; expected true or false"),
        (
            "    engine: {kv_dtype: int8}\nprefix_cache: {wire: float16}\n",
            "4:24",
            "pools[0].engine.kv_dtype: 'int8' is not accepted: prefixes are stored in float16; set",
        ),
        ("slo: [\n", "5:1", "it is no YAML"),
        ("slo: &a [*a]\n", "4:6", "it is no YAML: an alias stands for what it is within"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, more: str, place: str, told: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(tmp_path, HEAD + more)
    assert caught.value.message.startswith(f"{tmp_path / 'fleet.yaml'}:{place}: "), caught.value.message
    assert told in caught.value.message


def test_what_a_gpu_has_measured_is_read_once_and_kept(tmp_path: Path) -> None:
    """Replicas may be where the file is not; that it is measured, and by which file, stays with the figures."""
    rates = {
        "prefill_tokens_per_s": 900.0,
        "decode_s": [0.03 + 1e-4 * batch for batch in PROFILED_BATCH_SIZES],
        "context_s": 4e-7,
    }
    (tmp_path / "t4.json").write_text(json.dumps(rates))
    pool = "    simulate: T4\n    simulate_model: qwen2.5-7b\n"
    spec = load(tmp_path, HEAD + pool + "    measured: t4.json\n")
    [found] = spec.pools
    assert found.measured is None
    assert found.attained is not None
    assert found.attained.measured == "t4.json"
    assert FleetSpec.model_validate_json(spec.model_dump_json()) == spec
    (tmp_path / "t4.json").unlink()
    make = serve_app._make_worker(spec, found, None, None)
    assert make()._attained == RooflineShares(**found.attained.model_dump())
    (tmp_path / "t4.json").write_text(json.dumps(rates | {"prefill_tokens_per_s": 500.0}))
    [again] = load(tmp_path, HEAD + pool + "    measured: t4.json\n").pools
    assert again != found, "another content is a change of the fleet"
    (tmp_path / "t4.json").write_text(json.dumps(rates | {"device_name": "Tesla P40"}))
    with pytest.raises(ConfigurationError, match=r"fleet\.yaml:6:15: .*measured on Tesla P40; expected Tesla T4"):
        load(tmp_path, HEAD + pool + "    measured: t4.json\n")


@pytest.mark.parametrize("text", ["", "demo", "- a", "model: demo", "model: demo\npools: []", "model: demo\npools: x"])
def test_what_is_no_fleet_at_all(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"fleet\.yaml:\d+:\d+: "):
        load(tmp_path, text)


def test_of_no_pools_it_is_told_how_many(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r":2:8: pools: \[\] is not accepted; expected a list of at least 1$"):
        load(tmp_path, "model: demo\npools: []\n")


def test_the_first_of_several_is_told_and_how_many_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r":4:11: pools\[0\].cpus: .* \(and 1 more\)"):
        load(tmp_path, HEAD + "    cpus: -1\n    cost_per_hour: -1\n")


def test_no_such_file() -> None:
    with pytest.raises(ConfigurationError, match="it cannot be read: no such file or directory"):
        load_fleet(Path("/nowhere/fleet.yaml"))


def test_aliases_that_stand_for_more_than_fits(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    with pytest.raises(ConfigurationError, match="more than 20000 values"):
        load(tmp_path, "\n".join(lines))


def test_what_is_not_said_follows_from_what_is(tmp_path: Path) -> None:
    assert [ReplicaRange.model_validate(said) for said in (3, {}, {"min": 0}, {"min": 4}, {"start": 2, "max": 5})] == [
        ReplicaRange(min=3, max=3, start=3),
        ReplicaRange(min=1, max=1, start=1),
        ReplicaRange(min=0, max=1, start=1),
        ReplicaRange(min=4, max=4, start=4),
        ReplicaRange(min=1, max=5, start=2),
    ]
    merged = load(
        tmp_path, HEAD + "    engine: &e {kv_memory: 1GiB, threads: 1}\n  - name: b\n    engine: {<<: *e, threads: 2}\n"
    )
    assert [(pool.engine.kv_memory, pool.engine.threads) for pool in merged.pools] == [(2**30, 1), (2**30, 2)]


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    more = "security: {api_keys: keys.yaml, tls_cert: /etc/cert.pem}\n"
    spec = load(tmp_path, "model: ./weights\npools: [{name: a, quantization: {model: weights}}]\n" + more)
    assert spec.model == str(tmp_path / "weights")
    assert spec.pools[0].quantization.model == str(tmp_path / "weights")
    assert spec.security.api_keys == tmp_path / "keys.yaml"
    assert spec.security.tls_cert == Path("/etc/cert.pem")
    assert load(tmp_path, HEAD.replace("demo", "org/name")).model == "org/name"


def test_a_pool_s_engine_has_every_setting_of_engines() -> None:
    prefixes = {"prefix_cache", "prefix_cache_bytes", "prefix_wire", "prefix_after", "prefix_any_numerics"}
    elsewhere = {"device", "cpu_weights", "reuse_prefixes", "reader_timeout_s"} | prefixes
    elsewhere |= {"tensor_parallel", "pipeline_parallel", "pipeline_layers"}
    named = {ENGINE_NAMES.get(name, name) for name in EngineSpec.model_fields}
    assert named | elsewhere == {field.name for field in fields(EngineConfig)}
    assert not named & elsewhere
    said = {"max_running": 3, "kv_memory": "1KiB", "watchdog_s": 2}
    divided = {"tensor_parallel": 2, "pipeline_parallel": 2, "pipeline_layers": [6, 18]}
    spec = FleetSpec.model_validate(
        {
            "model": "demo",
            "pools": [{"name": "a", "engine": said, "quantization": {"cpu_weights": "int8"}, **divided}],
            "prefix_cache": {"reuse": False, "store": "memory", "memory": "1MiB", "wire": "int8", "after": 3},
            "service": {"reader_timeout_s": 7},
        }
    )
    assert engine_config(spec, spec.pools[0]) == EngineConfig(
        max_running=3, kv_memory_bytes=1024, watchdog_s=2.0, cpu_weights="int8", reuse_prefixes=False,
        reader_timeout_s=7.0, prefix_cache="memory", prefix_cache_bytes=2**20, prefix_wire="int8", prefix_after=3,
        tensor_parallel=2, pipeline_parallel=2, pipeline_layers=(6, 18),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ("{name: a}", {"num_cpus": 1.0}),
        ("{name: a, simulate: P40, cpus: 0, resources: {desk: 1}}", {"num_cpus": 0.0, "resources": {"desk": 1.0}}),
        ("{name: a, device: cuda}", GPU),
        ("{name: a, device: 'cuda:1'}", {"num_cpus": 1.0}),
        (
            "{name: a, accelerator: 'in(A10, A10G)', labels: {rack: '!r3'}}",
            {**GPU, "label_selector": {"rack": "!r3", "ray.io/accelerator-type": "in(A10,A10G)"}},
        ),
        (
            "{name: a, compute_capability: 8.0}",
            {**GPU, "label_selector": {"motley/compute-capability": "8.0"}},
        ),
        (
            "{name: a, compute_capability: '>=9.0'}",
            {**GPU, "label_selector": {"motley/compute-capability": "in(9.0,10.0,10.3,12.0)"}},
        ),
    ],
)  # fmt: skip
def test_what_ray_places_by(tmp_path: Path, said: str, options: dict[str, object]) -> None:
    assert placement_options(load(tmp_path, f"model: demo\npools: [{said}]\n").pools[0]) == {
        "ray_actor_options": options
    }


def test_what_ray_places_bundles_by(tmp_path: Path) -> None:
    """The replica in the first, and all on one node."""
    said = "{name: a, tensor_parallel: 2, labels: {rack: r3}, bundles: [{cpus: 2}, {cpus: 1.5, resources: {disk: 1}}]}"
    pool = load(tmp_path, f"model: demo\npools: [{said}]\n").pools[0]
    assert pool.booked_cpus == 3.5
    assert placement_options(pool) == {
        "ray_actor_options": {"num_cpus": 2.0},
        "placement_group_bundles": [{"CPU": 2.0}, {"CPU": 1.5, "disk": 1.0}],
        "placement_group_strategy": "STRICT_PACK",
        "placement_group_bundle_label_selector": [{"rack": "r3"}, {"rack": "r3"}],
    }
    serve.deployment(type("Replica", (), {}), **placement_options(pool))  # which Serve takes


def test_of_gpus_each_process_books_one(tmp_path: Path) -> None:
    of = "name: a, device: cuda, tensor_parallel: 2, pipeline_parallel: 2"
    pool = load(tmp_path, f"model: demo\npools: [{{{of}}}]\n").pools[0]
    assert placement_options(pool) == {"ray_actor_options": {"num_cpus": 4.0, "num_gpus": 4}}
    pool = load(tmp_path, f"model: demo\npools: [{{{of}, bundles: [{{}}, {{}}, {{}}, {{}}]}}]\n").pools[0]
    placed = placement_options(pool)
    assert placed["ray_actor_options"] == {"num_cpus": 1.0, "num_gpus": 1}
    assert placed["placement_group_bundles"] == [{"CPU": 1.0, "GPU": 1}] * 4
    serve.deployment(type("Replica", (), {}), **placed)  # which Serve takes


def test_stages_on_a_cpu_book_no_gpu(tmp_path: Path) -> None:
    """Nor do they want a node that has one of that kind."""
    of = "name: a, device: 'cuda,cpu', accelerator: T4, labels: {rack: r3}, pipeline_parallel: 2"
    pool = load(tmp_path, f"model: demo\npools: [{{{of}}}]\n").pools[0]
    assert placement_options(pool)["ray_actor_options"] == {
        "num_cpus": 2.0, "num_gpus": 1, "label_selector": {"rack": "r3", ACCELERATOR: "T4"},
    }  # fmt: skip
    pool = load(tmp_path, f"model: demo\npools: [{{{of}, bundles: [{{}}, {{cpus: 4}}]}}]\n").pools[0]
    placed = placement_options(pool)
    assert placed["placement_group_bundles"] == [{"CPU": 1.0, "GPU": 1}, {"CPU": 4.0}]
    assert placed["placement_group_bundle_label_selector"] == [{"rack": "r3", ACCELERATOR: "T4"}, {"rack": "r3"}]


def test_stages_may_be_on_several_nodes(tmp_path: Path) -> None:
    said = "{name: a, pipeline_parallel: 2, labels: {rack: r3}, bundles: [{}, {labels: {disk: ssd}}], strategy: SPREAD}"
    pool = load(tmp_path, f"model: demo\npools: [{said}]\n").pools[0]
    placed = placement_options(pool)
    assert placed["placement_group_strategy"] == "SPREAD"
    assert placed["placement_group_bundle_label_selector"] == [{"rack": "r3"}, {"rack": "r3", "disk": "ssd"}]
    assert pool.spread


@pytest.mark.parametrize(
    ("said", "cpus"),
    [
        ("{name: a}", 1.0),
        ("{name: a, tensor_parallel: 2, pipeline_parallel: 3}", 6.0),
        ("{name: a, tensor_parallel: 2, cpus: 0.5}", 0.5),
    ],
)
def test_a_replica_books_a_cpu_for_each_of_its_processes(tmp_path: Path, said: str, cpus: float) -> None:
    pool = load(tmp_path, f"model: demo\npools: [{said}]\n").pools[0]
    assert pool.booked_cpus == cpus
    assert placement_options(pool)["ray_actor_options"] == {"num_cpus": cpus}


def test_policies_have_the_settings_that_a_fleet_file_says_of_them() -> None:
    for name, policy in POLICIES.items():
        numbers = {each for each, kind in inspect.signature(policy).parameters.items() if kind.annotation == "float"}
        assert ScalingSpec.SETTINGS[name] == numbers
        said = plan_from_spec(
            FleetSpec.model_validate(
                yaml.safe_load(HEAD) | {"scaling": {"policy": name, **dict.fromkeys(numbers, 7.0)}}
            )
        )
        assert dict(said.policy.settings) == dict.fromkeys(numbers, 7.0)
        make_policy(said.policy)  # raises where it cannot be made


@given(st.floats(), st.sampled_from(["fixed", "queue", "slo"]))
@example(3.6e6, "fixed")
@example(1e-322, "slo")
def test_of_objectives_that_a_file_may_say_a_policy_is_made(milliseconds: float, policy: str) -> None:
    said = yaml.safe_load(HEAD) | {"slo": {"ttft_ms": milliseconds, "tpot_ms": milliseconds}}
    try:
        spec = FleetSpec.model_validate(said | {"scaling": {"policy": policy}})
    except ValidationError:
        return
    make_policy(plan_from_spec(spec).policy)  # raises where it cannot be made


def test_a_pool_may_have_its_weights_in_tiers() -> None:
    pool = {"name": "a", "engine": {"weights_memory": "2GiB"}}
    spec = FleetSpec.model_validate({"model": "demo", "pools": [pool]})
    assert engine_config(spec, spec.pools[0]) == EngineConfig(weights_memory_bytes=2**31)
