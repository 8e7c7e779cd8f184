"""isograd plan: what it prints and writes, that its layouts run and are proved, and every bad input that a command line can have."""
import json
import os
import re
import subprocess
import xml.etree.ElementTree

import pytest
from conftest import BINARY, BUILD, ROOT, isograd, ran, refused
from run_files import text_tables, write_documents, write_run

SIZES = "layers=2,hidden=64,heads=4,key_value_heads=2,vocabulary=258"
CLUSTER = """[cluster]
name = "two cores"
devices = {devices}
per_host = {devices}
host_memory = true

[device]
name = "core"
memory = "{memory}"
memory_bandwidth = "10 GB/s"
peak_float32 = "50 GFLOP/s"
peak_float64 = "25 GFLOP/s"
peak_bfloat16 = "50 GFLOP/s"

[[link]]
latency = "2 us"
bandwidth = "4 GB/s"
"""
# Of every family that isograd trains, with sizes that two ranks can cut along each axis.
FAMILIES = {"llama": {}, "qwen2": {"attention_bias": True}, "qwen3": {"query_key_norm": True}, "mistral": {},
            "mixtral": {"experts": 4, "expert_feed_forward": 24}, "qwen2_moe": {"attention_bias": True, "experts": 4, "expert_feed_forward": 12,
                                                                                "shared_expert_feed_forward": 8},
            "qwen3_moe": {"query_key_norm": True, "experts": 4, "expert_feed_forward": 12, "experts_every": 2},
            "dots1": {"query_key_norm": True, "experts": 4, "expert_feed_forward": 12, "shared_expert_feed_forward": 12, "dense_layers": 1}}


def write_cluster(folder, devices=2, memory="1 GB", old="", new=""):
    text = CLUSTER.format(devices=devices, memory=memory)
    assert old in text
    (folder / "cluster.toml").write_text(text.replace(old, new) if old else text)
    return folder / "cluster.toml"


@pytest.fixture
def cluster(tmp_path):
    return write_cluster(tmp_path)


@pytest.fixture
def config(tmp_path):
    write_documents(tmp_path, 20)
    return write_run(tmp_path / "run.toml", text_tables(8, 2, 32, (16, 2, 2, 2, 8, 24), train={"steps": 2}, data={"validation_fraction": 0.2}))


def planned(*arguments, status=0):
    return json.loads(isograd("plan", *arguments, "--json", status=status).stdout)


# What it prints


def test_models_may_be_a_file_a_folder_or_sizes(config, cluster, tmp_path):
    hub = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 258, "hidden_size": 64, "num_hidden_layers": 2,
           "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256, "max_position_embeddings": 8192,
           "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False}
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/config.json").write_text(json.dumps(hub))
    more = ["--cluster", cluster, "--tokens", "64k", "--seq", 512, "--dtype", "float32"]
    from_folder, from_text = planned(tmp_path / "hub", *more), planned(SIZES + ",feed_forward=256", *more)
    from_flags = planned("--layers", 2, "--hidden", 64, "--heads", 4, "--key-value-heads", 2, "--vocabulary", 258, "--feed-forward", 256, *more)
    assert from_text == from_flags and from_text["top"] == from_folder["top"]
    older = SIZES.replace("key_value_heads", "key_heads")  # its earlier name
    assert older != SIZES and planned(older + ",feed_forward=256", *more) == from_text and from_text["model"]["key_value_heads"] == 2
    assert planned("--layers", 2, "--hidden", 64, "--heads", 4, "--key-heads", 2, "--vocabulary", 258, "--feed-forward", 256, *more) == from_text
    assert from_text["work"] == {"tokens": 65536, "sequence": 512, "samples": 128, "precision": "float32", "fp32_gradients": True,
                                 "states": 2, "documents": 0}
    from_file = planned(config, "--cluster", cluster)
    assert from_file["work"]["tokens"] == 8 * 32 and from_file["work"]["precision"] == "float32"
    assert planned(config, "--cluster", cluster, "--dtype", "float64", "--tokens", 128)["work"]["tokens"] == 128


def test_the_same_bytes_on_every_run_and_lines_that_fit_a_terminal(cluster):
    arguments = [SIZES, "--cluster", "h100", "--gpus", 64, "--tokens", "1M"]
    text, again = ran("plan", *arguments), ran("plan", *arguments)
    assert text.stdout == again.stdout and text.stderr == ""
    assert max(map(len, text.stdout.splitlines())) <= 100
    assert ran("plan", *arguments, "--json").stdout == ran("plan", *arguments, "--json").stdout
    assert text.stdout != ran("plan", SIZES, "--cluster", "h100", "--gpus", 32, "--tokens", "1M").stdout
    for title in ("The fastest", "Memory of the fullest rank", "Time of a step", "Why none of its neighbours", "The recipe", "Limits"):
        assert title in text.stdout, text.stdout


def test_the_reference_has_the_keys():
    found = planned(SIZES, "--cluster", "h100", "--gpus", 16, "--tokens", 8 * 4096, "--scaling")
    page = (ROOT / "docs/planning_reference.md").read_text().partition("## JSON")[2]
    groups = [found, found["top"][0], *(found[name][0] for name in ("neighbours", "laws", "recipe", "ways_out", "scaling")),
              found["top"][0]["memory_parts"][0], ["tried", "largest_micro_batch"]]
    assert not [key for group in groups for key in group if f"`{key}`" not in page]
    assert set(found["top"][0]["seconds"]) == {"value", "low", "high", "origin"} and "{value, low, high, origin}" in page


def test_more_devices_than_sequences_have_three_ways_out(cluster):
    found = planned(SIZES, "--cluster", "h100", "--gpus", 16, "--tokens", 8 * 4096)
    assert len(found["ways_out"]) == 3 and found["top"], found["ways_out"]


@pytest.mark.parametrize("gpus", [24000, 120, 8 * 3001])
def test_odd_numbers_of_devices_have_a_plan(gpus):
    found = planned("layers=32,hidden=4096,heads=32,key_value_heads=8", "--cluster", "h100", "--gpus", gpus, "--tokens", "16M")
    assert found["top"] and found["top"][0]["candidate"]["ranks"] <= gpus


def test_a_prime_number_of_devices_uses_those_it_can(tmp_path):
    found = planned(SIZES, "--cluster", write_cluster(tmp_path, devices=7), "--tokens", 6 * 4096, "--dtype", "float32")
    assert found["top"][0]["candidate"]["ranks"] <= 7
    assert found["top"][0]["candidate"]["ranks"] == 7 or any("idle" in text for text in found["warnings"])


def test_where_nothing_fits_the_nearest_is_named():
    done = isograd("plan", "layers=126,hidden=16384,heads=128,key_value_heads=8,feed_forward=53248,vocabulary=128256", "--cluster", "h100",
                   "--gpus", 8, "--tokens", "1M", status=1)
    assert "No layout fits: " in done.stdout and "lacks" in done.stdout and "GiB" in done.stdout and "The nearest" in done.stdout
    huge = isograd("plan", "layers=2,hidden=262144,heads=1024,vocabulary=32000", "--cluster", "tpu-v5e", "--gpus", 8, "--tokens", "1M", status=1)
    assert "lacks" in huge.stdout


def test_a_large_plan_has_finite_numbers():
    arguments = ["layers=126,hidden=262144,heads=64", "--cluster", "gb300", "--gpus", 1 << 20, "--tokens", "8G", "--strategy", "zero3"]
    done = isograd("plan", *arguments, "--json")
    assert done.returncode in (0, 1) and "null" not in done.stdout.replace('"nearest": null', "").replace('"seconds": null', ""), done.stderr
    assert json.loads(done.stdout)["model"]["parameters"] > 1e13


# What it writes


def test_a_written_plan_has_the_bytes_that_layout_and_train_say(config, cluster, tmp_path):
    for strategy in ("bucketed", "zero1", "zero2", "zero3"):
        best = tmp_path / f"{strategy}.toml"
        found = planned(config, "--cluster", cluster, "--strategy", strategy, "--write", best)["top"][0]
        ranks = found["candidate"]["ranks"]
        views = [json.loads(ran("layout", best, "--ranks", ranks, "--rank", rank, "--json").stdout) for rank in range(ranks)]
        assert all(view["strategy"] == strategy for view in views)
        kept = [view["totals"]["bytes"]["total"] for view in views]
        assert found["memory"]["kept"] == views[0]["totals"]["formula"]["total"], (strategy, views[0]["totals"], found["memory"])
        assert found["memory"]["kept"] <= max(kept) <= 1.02 * found["memory"]["kept"]  # padding of buckets
        said = ran("train", best, "--ranks", ranks, "--memory", "verify.at_end=false", f"run.directory={tmp_path}/{strategy}")
        said = said.stdout + said.stderr
        assert f"{max(kept) / 1e6:.2f}" in said, said


@pytest.mark.parametrize("family", FAMILIES)
def test_the_chosen_layout_of_every_family_is_proved(family, tmp_path):
    write_documents(tmp_path, 20)
    turn = list(FAMILIES).index(family)
    model = {"family": family, "vocabulary": 258, **FAMILIES[family]}
    config = write_run(tmp_path / "run.toml", text_tables(8, 2, 32, (16, 2, 2, 2, 8, 24), model=model))
    strategy = ["bucketed", "zero1", "zero2", "zero3"][turn % 4]
    for more in ([], ["--strategy", strategy]):
        ran("plan", config, "--cluster", write_cluster(tmp_path), "--write", tmp_path / "best.toml", *more)
        found = ran("verify", tmp_path / "best.toml", "--ranks", 2)
        assert "PASS" in found.stdout, found.stdout


def test_sizes_alone_become_a_run(cluster, tmp_path):
    best = tmp_path / "best.toml"
    ran("plan", SIZES, "--cluster", cluster, "--tokens", 2048, "--seq", 256, "--dtype", "float32", "--write", best)
    assert "PASS" in ran("verify", best, "--ranks", 2, cwd=ROOT).stdout


def test_pictures_and_the_page_are_whole_documents(cluster, tmp_path):
    ran("plan", SIZES, "--cluster", "h100", "--gpus", 16, "--tokens", "256k", "--scaling", "--svg", tmp_path / "a/pictures", "--html",
        tmp_path / "page.html")
    names = {path.name for path in (tmp_path / "a/pictures").iterdir()}
    assert names == {"memory.svg", "timeline.svg", "timeline.json", "front.svg", "scaling.svg", "step.svg"}
    for name in names - {"timeline.json"}:
        assert xml.etree.ElementTree.parse(tmp_path / "a/pictures" / name).getroot().tag.endswith("svg")
    json.loads((tmp_path / "a/pictures/timeline.json").read_text())
    assert "<script" not in (tmp_path / "page.html").read_text()


def test_validate_prints_errors_by_source(tmp_path):
    rows = tmp_path / "rows.csv"
    names = ("id,tier,source,hardware,framework,recompute,flags,precision,gpus,model,layers,hidden,heads,kv_heads,ffn,glu,vocab,tied,seq,gbs,mbs,"
             "grad_acc,dp,shards,zero,tp,sp,cp,ep,pp,vpp,schedule,step_s,tokens_per_s_per_gpu,samples_per_s,tflops_per_gpu,tflops_kind,mem_gb,"
             "twin_ratio")
    row = ("r{},A,here,H100-SXM-80GB,torchtitan,none,,bf16,{},8B,32,4096,32,8,14336,1,128256,0,8192,{},1,1,{},{},3,1,1,1,1,1,1,,{},,,,,,")
    lines = [row.format(n, 8 * n, 8 * n, 8 * n, 8 * n, 2.5) for n in (1, 2, 4)]
    rows.write_text("\n".join([names, *lines]) + "\n")
    said = ran("plan", "--validate", rows).stdout
    assert "torchtitan" in said and "median" in said and "seconds" in said, said
    rows.write_text(names + "\n")
    assert "none of which can be predicted" in refused("plan", "--validate", rows)
    rows.write_text("\n".join([names, lines[0].replace(",4096,", ",many,")]) + "\n")
    assert "rows.csv, line 2" in refused("plan", "--validate", rows)


# On this machine


def test_tries_are_printed_with_what_was_predicted(tmp_path):
    write_documents(tmp_path, 20, lambda i: "abc " * 800)
    config = write_run(tmp_path / "run.toml", text_tables(8, 2, 32, (16, 2, 2, 2, 8, 24)))
    cluster = write_cluster(tmp_path, memory="20 MB")
    found = planned(config, "--cluster", cluster, "--try", 1, "--strategy", "zero2")
    (tried,) = found["tried"]
    assert tried["measured_seconds"] > 0 and tried["measured_bytes"] > 0 and tried["why_not"] == "", tried
    largest = found["largest_micro_batch"]
    sizes = dict((one["micro_batch"], one["fits"]) for one in largest["tried"])
    assert sizes[largest["measured"]] and not sizes[largest["measured"] + 1] and largest["ended_early"] == "", largest
    assert largest["predicted"] == pytest.approx(largest["measured"], rel=0.15), largest
    assert not (tmp_path / "run").exists()


def test_layouts_for_more_cores_are_refused_each(tmp_path):
    ranks = 2 * os.cpu_count()
    done = isograd("plan", SIZES, "--cluster", write_cluster(tmp_path, devices=ranks), "--tokens", ranks * 4096, "--dtype", "float32", "--try", 1,
                   "--top", 2, status=1)
    assert done.stdout.count(f"not run: {ranks} cores, one for each rank; here are {os.cpu_count()}") == 2, done.stdout
    done = isograd("plan", SIZES, "--cluster", "h100", "--tokens", "1M", "--try", 1, "--top", 1, status=1)
    assert "not run: 64 GPUs; here are" in done.stdout


# Bad input

H100 = "--cluster h100 --tokens 1M"
REFUSED = [
    (f"{SIZES} --cluster h10 --tokens 1M", "h10", "Did you mean h100?"),
    (f"{SIZES} --tokens 1M", "--cluster", "here, a TOML file"),
    (f"{SIZES} --cluster h100", "--tokens", "4M"),
    (f"{H100}", "no model"),
    (f"{SIZES} --layers 3 {H100}", "sizes of another one"),
    (f"--layers 3 {H100}", "model without hidden"),
    (f"{SIZES},hiden=3 {H100}", "hiden", "hidden"),
    (f"{SIZES.replace('=64', '=66')} {H100}", "a multiple of heads"),
    (f"layers=0,hidden=64,heads=4 {H100}", "layers"),
    (f"layers=2,hidden=-64,heads=4 {H100}", "hidden"),
    (f"layers=2,hidden=nan,heads=4 {H100}", "hidden"),
    (f"layers=2,hidden=64,heads=4,n_kv_heads=2 {H100}", 'Did you mean "key_value_heads"?'),
    (f"layers=2,hidden=64,heads=4,key_value_heads=2,key_heads=2 {H100}", "twice"),
    (f"layers=99999,hidden=16777216,heads=4,feed_forward=16777216 {H100}", "parameters"),
    (f"nowhere.toml {H100}", "nowhere.toml"),
    (f"{SIZES} --cluster h100 --tokens 0", "tokens", "above 0"),
    (f"{SIZES} --cluster h100 --tokens -5", "tokens"),
    (f"{SIZES} --cluster h100 --tokens nan", "tokens"),
    (f"{SIZES} --cluster h100 --tokens inf", "tokens"),
    (f"{SIZES} --cluster h100 --tokens 4MB", "4MB", "4M"),
    (f"{SIZES} --cluster h100 --tokens 1e30", "tokens"),
    (f"{SIZES} --cluster h100 --tokens 100", "100 tokens", "at least the 4096 of a sequence"),
    (f"{SIZES} --cluster h100 --tokens 10000", "Take 8192 or 12288"),
    (f"{SIZES} {H100} --seq 0", "sequence"),
    (f"{SIZES} {H100} --seq 99999999999", "sequence"),
    (f"{SIZES} {H100} --gpus 0", "cluster.devices"),
    (f"{SIZES} {H100} --gpus -8", "cluster.devices"),
    (f"{SIZES} {H100} --gpus 12", "12 devices in hosts of 8", "Take 8 or 16"),
    (f"{SIZES} {H100} --gpus 99999999999999", "cluster.devices"),
    (f"{SIZES} {H100} --dtype float16", "float16"),
    (f"{SIZES} --cluster a100-80 --tokens 1M --dtype float8", "float8, of which a100-80 has no peak", "bfloat16"),
    (f"{SIZES} {H100} --strategy zero4", "zero4"),
    (f"{SIZES} {H100} --top 0", "--top"),
    (f"{SIZES} {H100} --try -1", "--try"),
    (f"{SIZES} {H100} --dtype float8 --write {{folder}}/best.toml", "train.dtype"),
    (f"{SIZES} {H100} --write {{folder}}/none/best.toml", "none"),
    (f"{SIZES} {H100} --write /proc/best.toml", "/proc"),
    (f"{SIZES} {H100} --html {{folder}}/run.toml/page.html", "run.toml"),
    (f"{SIZES} {H100} --svg {{folder}}/run.toml", "run.toml"),
    ("{folder}/run.toml --cluster {folder}/cluster.toml --write {folder}/run.toml", "run.toml"),
    (f"{SIZES} --cluster {{folder}}/cluster.toml --tokens 1M --write {{folder}}/cluster.toml", "cluster.toml"),
    ("--validate {folder}/none.csv", "none.csv"),
    ("--validate {folder}/run.toml", "run.toml"),
    (f"{SIZES} {H100} --claster x", "Did you mean --cluster?"),
]


@pytest.mark.parametrize("line, parts", [(line, parts) for line, *parts in REFUSED], ids=[line for line, *_ in REFUSED])
def test_bad_input_is_refused_in_few_words(config, cluster, tmp_path, line, parts):
    known = {"folder": tmp_path}
    said = refused("plan", *line.format(**known).split())
    for part in parts:
        assert part.format(**known) in said, said
    assert said.count("ConfigError") <= 1


CLUSTERS = [
    ('memory = "1 GB"', "memory = 1e30", "memory"), ('memory = "1 GB"', "memory = 0", "memory"), ('memory = "1 GB"', "memory = nan", "memory"),
    ('memory = "1 GB"', "memory = 80", "at least"), ('bandwidth = "4 GB/s"', "bandwidth = 0", "bandwidth"),
    ('bandwidth = "4 GB/s"', 'bandwidth = "3600 GB/s"', "is that Gb/s?"), ('bandwidth = "4 GB/s"', "bandwidth = inf", "bandwidth"),
    ('latency = "2 us"', "latency = 14", "latency"), ('latency = "2 us"', "latency = -1", "latency"),
    ("host_memory = true", "host_memori = true", "Did you mean"), ("per_host = 2", "per_host = 0", "per_host"),
    ("devices = 2\nper_host = 2", "devices = 3\nper_host = 2", "3 devices in hosts of 2"), ("[[link]]", "[[lynk]]", "link"),
    ("[[link]]", "[[link]]\nranks = 1", "joins"), ('name = "core"', "name = 3", "a text"),
    ("[[link]]", '[calibration]\nformat = 3\nmachine = "another"\n[[product]]\nm = 8\nn = 8\nk = 8\nprecision = "float32"\nflops = 1e9\n[[link]]',
     "another"),
    ("[[link]]", '[calibration]\nformat = 99\nmachine = "another"\n[[link]]', "99"),
]


@pytest.mark.parametrize("old, new, part", CLUSTERS)
def test_bad_clusters_are_refused(tmp_path, old, new, part):
    said = refused("plan", SIZES, "--cluster", write_cluster(tmp_path, old=old, new=new), "--tokens", "64k", "--dtype", "float32")
    assert part in said and "cluster.toml" in said, said


def test_bad_folders_are_refused(tmp_path):
    good = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 258, "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256, "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False}
    config = tmp_path / "config.json"

    def said_of(data):
        config.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
        return refused("plan", tmp_path, *H100.split())
    assert "hidden_size" in said_of({key: value for key, value in good.items() if key != "hidden_size"})
    assert "mamba" in said_of({**good, "model_type": "mamba"})
    assert "quantization_config" in said_of({**good, "quantization_config": {"quant_method": "gptq"}})
    assert "head_dim" in said_of({**good, "head_dim": 7})
    assert "config.json" in said_of([good]) and "config.json" in said_of(b"\xff\xfe{") and "config.json" in said_of(b"")
    assert "layers=32" in said_of({**good, "model_type": "mamba"})  # what to do
    with config.open("wb") as file:
        file.truncate(2 << 30)
    assert "config.json" in refused("plan", tmp_path, *H100.split())
    config.unlink()
    assert "config.json" in refused("plan", tmp_path, *H100.split())
    scaled = {**good, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                       "original_max_position_embeddings": 8192}}
    config.write_text(json.dumps(scaled))
    assert planned(tmp_path, *H100.split())["top"]


def test_here_is_what_calibrate_wrote(tmp_path):
    assert "isograd calibrate" in refused("plan", SIZES, "--cluster", "here", "--tokens", "1M", cwd=tmp_path)
    (tmp_path / ".cache/isograd").mkdir(parents=True)
    write_cluster(tmp_path, devices=4).rename(tmp_path / ".cache/isograd/here.toml")
    asked = ["plan", SIZES, "--cluster", "here", "--gpus", 2, "--tokens", "64k", "--dtype", "float32", "--scaling", "--json"]
    found = json.loads(ran(*asked, cwd=tmp_path).stdout)
    assert [point["devices"] for point in found["scaling"]] == [1, 2, 4] and found["top"][0]["candidate"]["ranks"] == 2


def test_an_adapter_is_not_planned(config, cluster, tmp_path):
    config.write_text(config.read_text() + "[model.lora]\nrank = 4\n")
    assert "model.lora.rank" in refused("plan", config, "--cluster", cluster)


def test_a_reader_that_leaves_is_no_defect(tmp_path):
    command = f"{BINARY} plan {SIZES} {H100} --json | head -c 10 > /dev/null; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout.split()[-1] in ("0", "2", "141") and "defect" not in done.stderr and "did not foresee" not in done.stderr, done
    done = subprocess.run(["bash", "-c", f"{BINARY} plan {SIZES} {H100} > /dev/full"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "standard output" in done.stderr, done


def test_the_header_needs_no_libtorch(tmp_path):
    (tmp_path / "planned.cpp").write_text('#include "isograd/planner.hpp"\nisograd::planner::Plan plan;\n')
    compiler = re.search(r"CMAKE_CXX_COMPILER:\w+=(.+)", (BUILD / "CMakeCache.txt").read_text())[1]
    done = subprocess.run([compiler, "-std=c++20", "-fsyntax-only", "-I", ROOT / "include", tmp_path / "planned.cpp"], capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_from_python(installed, cluster, tmp_path):
    script = f"""
import json, isograd, isograd.planning
found = isograd.planning.plan({{"layers": 2, "hidden": 64, "heads": 4, "key_value_heads": 2, "vocabulary": 258}}, {str(cluster)!r}, tokens=65536,
                              sequence=512, dtype="float32", write={str(tmp_path / 'best.toml')!r})
try:
    isograd.planning.plan("nowhere", "h100", tokens=1 << 20)
except isograd.ConfigError as error:
    found["error"] = str(error)
print(json.dumps(found))
"""
    done = subprocess.run([str(installed), "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("error").startswith("nowhere") or "nowhere" in done.stdout
    assert found == planned(SIZES, "--cluster", cluster, "--tokens", 65536, "--seq", 512, "--dtype", "float32")
    assert (tmp_path / "best.toml").exists()
