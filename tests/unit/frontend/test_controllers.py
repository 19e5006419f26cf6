"""How controllers are set up in the caller's process, and what their actions change, with and without a server."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace

import numpy as np
import pytest

import vllm_weir as weir
from tests.support.sae_reference import weights
from tests.unit.frontends import frontend_of
from tests.unit.refusals import pairs, refused
from tests.unit.request_strategies import served
from vllm_weir import Add, Capture, Probe, WeirError, When, controllers
from vllm_weir.controllers import AsyncController, SyncController
from vllm_weir.frontend.admission.admit import admit
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.engine_wire import make_engine_request
from vllm_weir.frontend.admission.sae_registry import SharedSAE
from vllm_weir.frontend.controllers import FrontendActions, add_object, check_controllers, remove, set_up
from vllm_weir.sae import transfer
from vllm_weir.schema.engine_spec import EngineSpec
from vllm_weir.schema.engine_traits import TableSizes
from vllm_weir.schema.gates import parse_controllers
from vllm_weir.schema.resolved_probes import ResolvedGate
from vllm_weir.server.shared.state_files import SharedState

D, LAYERS = 8, 4
FACTS = EngineCapabilities(served(LAYERS), LAYERS, D, "float32", 1024)
ONES = np.ones(D, np.float32)


class Watch(AsyncController):
    def __init__(self, probes=(), captures=()):
        self.probes, self.captures = list(probes), list(captures)

    def score(self, request, scores):
        pass


class Closed(Watch):
    def open(self, engine):
        raise OSError("no such place")


class Reads(SyncController):
    probes = ("mood", Probe("own", ONES, layer=1))

    def __init__(self, level=1.0):
        if level < 0:
            raise WeirError("a number from 0", "level")


class Blind(Reads):
    probes = ()


def settings(**named):
    return parse_controllers({name: {f"{__name__}:{which}": options} for name, (which, options) in named.items()})


@pytest.fixture
def frontend():
    made = frontend_of(FACTS)
    made.manager.open(controllers.EngineInfo("m", LAYERS, D, "float32"))
    yield made
    made.close()


@pytest.fixture(params=[False, True], ids=["alone", "shared"])
def change(request, frontend, tmp_path):
    """Another process changes what the processes of a server share; nobody does where there is one."""
    return share(frontend, tmp_path) if request.param else lambda edit: None


def mood(**more):
    return Probe("mood", ONES, layer=0, **more)


def share(frontend, folder):
    """Give a frontend the state that a server's processes share; return how another process changes it."""
    frontend.names.source = SharedState(folder)
    return SharedState(folder).change


def test_actions_change_names_and_globals(frontend, change):
    """In a process of its own, and in the state that a server's processes share."""
    actions = FrontendActions(frontend)
    digest = actions.set_vector("dial", ONES)
    frontend.names.refresh()
    assert frontend.names.vectors.names() == {"dial": {"digest": digest, "shape": [D]}}
    actions.set_global(Add("dial", 2))
    other = actions.set_vector("dial", 2 * ONES)
    frontend.names.refresh()
    assert other != digest and frontend.names.vectors.names()["dial"]["digest"] == other
    (one,) = frontend.names.always
    assert one.vector.digest == digest, "it keeps what its name stood for"
    for wrong in (lambda: actions.set_global(Add([1.0], 2)), lambda: actions.set_vector("x", "nothing")):
        with pytest.raises(WeirError):
            wrong()
    frontend.names.refresh()
    assert frontend.names.always == (one,) and list(frontend.names.vectors.names()) == ["dial"]
    actions.remove_vector("dial")
    actions.clear_global()
    frontend.names.refresh()
    assert not frontend.names.always and not frontend.names.vectors.names()
    with pytest.raises(WeirError, match="'dial'"):
        actions.remove_vector("dial")


def test_a_global_names_nothing_that_another_process_has_just_removed(frontend, tmp_path, monkeypatch):
    """Workers encode rows for a TopK autoencoder, which they lack once it is unloaded."""
    file = tmp_path / "sae.safetensors"
    transfer.write(weir.SAE.from_tensors("topk", ("resid_post", 1), **weights("topk", d_in=D), k=3), file)
    change = share(frontend, tmp_path / "shared")
    change(lambda contents: replace(contents, saes={"it": SharedSAE("it#1", str(file))}))
    actions, feature = FrontendActions(frontend), weir.SetFeature("it", 2, value=1.0)
    actions.set_global(feature)
    frontend.names.refresh()
    (one,) = frontend.names.always
    assert one.sae == "it#1"
    actions.clear_global()
    edit_state = frontend.names.source.change

    def late(edit):
        change(lambda contents: replace(contents, saes={}))
        return edit_state(edit)

    monkeypatch.setattr(frontend.names.source, "change", late)
    with pytest.raises(WeirError, match="no autoencoder is loaded as 'it'"):
        actions.set_global(feature)
    assert not SharedState(tmp_path / "shared").read().always


def test_actions_do_not_keep_an_engine_alive():
    frontend = frontend_of(FACTS)
    actions = FrontendActions(frontend)
    frontend.close()
    del frontend
    gc.collect()
    with pytest.raises(WeirError, match="closed"):
        actions.clear_global()


def test_a_controller_in_python(frontend):
    """Its probes score every request and its captures are of every request, until it is removed."""
    watch = Watch([mood(positions="sampled")], [Capture("resid_post", 1)])
    add_object(frontend, "a", watch, {"policy": "drop", "required": True})
    assert frontend.universal and [one.probe.name for one in frontend.names.probes.everyone] == ["mood"]
    assert [capture.sink.name for capture in frontend.manager.everyone] == ["controller:a"]
    state = frontend.manager.report()["controller:a"]
    assert (state["consumer"], state["policy"]) == ("Watch", "drop")
    with refused("name", "already"):
        add_object(frontend, "a", Watch(), {})
    remove(frontend, "a")
    assert not frontend.universal and not frontend.manager.report() and not frontend.names.probes.registered
    with pytest.raises(WeirError, match="no controller 'a'"):
        remove(frontend, "a")


def test_a_controller_that_cannot_be_added_leaves_no_probes(frontend, change):
    """Nor replaces any, whatever is wrong: a later probe, a capture, or what `open` raises."""
    frontend.names.add_scoring([mood(positions="sampled")])
    frontend.names.refresh()
    before = frontend.names.probes.registered["mood"].probe
    new = [Probe("mood", 2 * ONES, layer=1), Probe("other", ONES, layer=1)]
    for controller, why in (
        (Watch([*new, Probe("far", ONES, layer=9)]), "block 9 does not exist"),
        (Watch([*new, "glad"]), "give the probe itself"),
        (Watch(new, [Capture("resid_post", 1, sink="elsewhere")]), "leave sink and keep out"),
        (Closed(new), "cannot be opened: OSError: no such place"),
    ):
        with pytest.raises(WeirError, match=why):
            add_object(frontend, "a", controller, {})
        change(lambda contents: replace(contents, tiers=0))
        frontend.names.refresh()
        (left,) = frontend.names.probes.everyone
        assert (left.probe.layer, left.probe.weight.digest) == (before.layer, before.weight.digest)
        assert not frontend.manager.report()


def test_a_failing_open_undoes_what_it_set(frontend, change):
    """And nothing else: neither what was there before, nor what others have set meanwhile."""
    actions = FrontendActions(frontend)
    actions.set_vector("dial", ONES)
    actions.set_global(Add(ONES, 1))

    class Fails(Watch):
        then = None

        def open(self, engine):
            self.actions.set_global(Add(3 * ONES, 2, when=When("mood", above=0)))
            self.actions.set_vector("dial", 2 * ONES)
            self.actions.set_vector("own", ONES)
            self.actions.set_global(Add("own", 3, when=When("mood", above=0)))
            if self.then is not None:
                beside = threading.Thread(target=self.then, daemon=True)
                beside.start()
                beside.join(20)
            raise OSError("no such place")

    def left():
        frontend.names.refresh()
        names = frontend.names
        digest = names.vectors.names()["dial"]["digest"]
        assert digest == actions.set_vector("dial", ONES) and list(names.vectors.names()) == ["dial"]
        assert not names.probes.registered and not frontend.manager.report()
        return [one.layers for one in names.always]

    with pytest.raises(WeirError, match="cannot be opened: OSError: no such place"):
        add_object(frontend, "a", Fails([mood()]), {})
    assert left() == [(1,)]
    fails = Fails([mood()])
    fails.then = lambda: actions.set_global(Add(ONES, 0))
    with pytest.raises(WeirError, match="cannot be opened: OSError: no such place"):
        add_object(frontend, "a", fails, {})
    assert left() == [(0,)]
    fails.then = lambda: actions.set_global(Add(ONES, 1, when=When("mood", above=1)))
    with pytest.raises(WeirError, match="cannot be opened: OSError: no such place"):
        add_object(frontend, "a", fails, {})
    assert list(frontend.names.probes.registered) == ["mood"], "it gates what another has set for everyone"
    actions.clear_global()


def test_probes_of_every_request_are_checked_alike(frontend, change):
    """Whether the names are of one process or shared: by their positions, and vectors by name are looked up."""
    with refused("probe.positions", "not every prompt has image"):
        frontend.names.add_scoring([mood(positions={"modality": "image"})])
    frontend.names.put_vector("dial", 2 * ONES)
    frontend.names.add_scoring([Probe("mood", "dial", layer=0)])
    frontend.names.remove_vector("dial")
    change(lambda contents: replace(contents, tiers=0))
    frontend.names.refresh()
    (one,) = frontend.names.probes.everyone
    assert np.array_equal(one.probe.weight.array.reshape(-1), 2 * ONES)
    frontend.names.set_always([Add(ONES, 2, when=When("mood", above=0))])
    with pytest.raises(WeirError, match="block"):
        frontend.names.add_scoring([Probe("mood", ONES, layer=3)])  # after what it gates
    frontend.names.refresh()
    assert [one.probe.layer for one in frontend.names.probes.everyone] == [0]


def test_names_given_in_python_are_shared(frontend, tmp_path):
    """What `weir.register`, `register_probe` and `set_global` change is of all processes of a server."""
    share(frontend, tmp_path)
    frontend.names.put_vector("dial", ONES)
    frontend.names.register_probe(mood())
    frontend.names.set_always([Add("dial", 2)])
    contents = SharedState(tmp_path).read()
    assert list(contents.vectors) == ["dial"] and list(contents.probes) == ["mood"] and len(contents.always) == 1


def test_open_may_set_what_the_controller_s_probes_gate(frontend, tmp_path):
    """Another thread may set something meanwhile, too: neither waits for the other's lock."""
    share(frontend, tmp_path)
    other = FrontendActions(frontend)

    class Sets(Watch):
        def open(self, engine):
            self.actions.set_global(Add(ONES, 2, when=When("mood", above=0)))
            beside.start()
            beside.join(20)
            assert not beside.is_alive()

    beside = threading.Thread(target=lambda: other.set_global(Add(ONES, 3)), daemon=True)
    add_object(frontend, "a", Sets([mood()]), {})
    frontend.names.refresh()
    (one,) = frontend.names.always
    assert one.layers == (3,) and frontend.manager.report()


def test_a_removed_controller_s_probes_stay_away(frontend, change):
    """Whatever changes later; a controller of which a probe is still needed is not removed by half."""
    add_object(frontend, "a", Watch([mood(), Probe("other", ONES, layer=1)]), {})
    frontend.names.refresh()
    actions = FrontendActions(frontend)
    actions.set_global(Add(ONES, 2, when=When("other", above=0)))
    with pytest.raises(WeirError, match="gated by 'other'"):
        remove(frontend, "a")
    change(lambda contents: replace(contents, tiers=0))
    assert (
        frontend.universal and list(frontend.names.probes.registered) == ["mood", "other"] and frontend.manager.report()
    )
    actions.clear_global()
    remove(frontend, "a")
    change(lambda contents: replace(contents, tiers=0))
    assert not frontend.universal and not frontend.names.probes.registered and not frontend.manager.report()


def test_an_unregistered_probe_stays_away(frontend, change):
    frontend.names.add_scoring([mood()])
    frontend.names.unregister_probe("mood")
    change(lambda contents: replace(contents, tiers=0))
    assert not frontend.universal and not frontend.names.probes.registered
    with refused("name", "no probe is registered under 'mood'"):
        frontend.names.unregister_probe("mood")


def test_probes_wait_until_the_engine_is_known():
    frontend = frontend_of(None)
    add_object(frontend, "a", Watch([mood()]), {})
    assert frontend.universal and not frontend.names.probes.registered
    with pytest.raises(WeirError, match="leave sink and keep out"):
        add_object(frontend, "b", Watch([mood()], [Capture("resid_post", 1, sink="elsewhere")]), {})
    assert frontend.universal
    remove(frontend, "a")
    assert not frontend.universal
    frontend.close()


WRONG = {
    "an object of a subclass of AsyncController, got Watch": [Watch],
    "got int": [3],
    "name its class in the setting controllers": [Reads(), Reads],
    "give the probe itself": [Watch(["mood"])],
    "block 9 does not exist": [Watch([Probe("far", ONES, layer=9)])],
    "leave sink and keep out": [Watch(captures=[Capture("resid_post", 1, sink="elsewhere")])],
}


@pytest.mark.parametrize(("why", "controller"), pairs(WRONG))
def test_wrong_objects_are_refused(frontend, controller, why):
    with pytest.raises(WeirError, match=why):
        add_object(frontend, "a", controller, {})
    assert not frontend.manager.report() and not frontend.names.probes.registered


@pytest.mark.parametrize(
    ("named", "field", "why"),
    [
        (("Nobody", {}), "settings.controllers.a", "cannot be imported: AttributeError"),
        (("D", {}), "settings.controllers.a", "no subclass of"),
        (("Reads", {"level": -1}), "level", "a number from 0"),
        (("Reads", {"lvel": 1}), "Reads", "cannot be set up: TypeError"),
        (("Blind", {}), "settings.controllers.a", "reads at least one probe"),
    ],
)
def test_wrong_settings_are_refused(frontend, named, field, why):
    with pytest.raises(WeirError, match=why) as error:
        set_up(frontend, settings(a=named))
    assert error.value.field.endswith(field)


def test_settings_of_a_sync_controller_are_its_options_alone():
    check_controllers(settings(a=("Watch", {}), b=("Reads", {})))
    with refused("settings.controllers.a", "has no queue"):
        check_controllers(parse_controllers({"a": {f"{__name__}:Reads": {}, "policy": "drop"}}))
    with pytest.raises(WeirError, match="no controller 'x' is installed"):
        check_controllers(parse_controllers({"a": {"x": {}}}))


def test_workers_make_the_sync_ones_for_themselves():
    one, other = (controllers.make_sync(settings(a=("Watch", {}), b=("Reads", {"level": 2.0}))) for _ in range(2))
    assert list(one) == ["b"] and type(one["b"]) is Reads and one["b"] is not other["b"]


def asked(*interventions, probes=()):
    return weir.params(interventions=list(interventions), probes=list(probes)).extra_args


def sent(found):
    return make_engine_request(found, "reply", tuple(range(6)), 6, 5, FACTS, 1, TableSizes(64, 64, 1024))


def test_a_request_under_a_sync_controller(frontend):
    """It gets the controller's probes, its own before registered ones; only generated tokens are decided on."""
    set_up(frontend, settings(b=("Reads", {})))
    steer = lambda positions="generated", name="b", layer=0: Add(
        ONES, layer, positions=positions, when=When(f"controller:{name}")
    )
    ask = lambda *moves, probes=(): admit(asked(*moves, probes=probes), FACTS, probes=frontend.names.probes)
    with refused("interventions[0].when.probe", "'mood'"):
        ask(steer())
    frontend.names.register_probe(mood())
    found = ask(steer(), Add(ONES, 3))
    assert [probe.name for probe in found.probes] == ["mood", "own"] and [one.gate for one in found.interventions] == [
        0,
        -1,
    ]
    assert found.gates == (ResolvedGate(0, 0, 0.0, delay=1, controller="b", reads=(0, 1)),)
    mine = ask(steer(), probes=[Probe("mood", 2 * ONES, layer=1, positions="generated")])
    assert mine.probes[0] != found.probes[0] and mine.gates == found.gates
    spec = EngineSpec.from_wire(found.wire)
    assert spec == found.engine_spec and spec.gated_from(6) == 6
    assert sent(mine).first_position == 0, "`own` scores the prompt"
    for positions in ("all", "sampled", "prompt", [7, 8]):
        with refused("interventions[0].positions", "positions='generated'"):
            ask(steer(positions, layer=2))
    with pytest.raises(WeirError, match="there are b"):
        ask(steer(name="c", layer=2))
    with pytest.raises(WeirError, match="there is none"):
        admit(asked(steer()), FACTS)


def test_the_last_token_of_a_prompt_is_computed_for_the_request_itself(frontend):
    """After its pass the controller decides on the first generated token, though nothing of the prompt is scored."""
    frontend.names.probes.controllers["c"] = (mood(positions="generated"),)
    move = Add(ONES, 2, positions="generated", when=When("controller:c"))
    assert sent(admit(asked(move), FACTS, probes=frontend.names.probes)).first_position == 5
