"""What the pack adds to the page around the node: status colours, settings, templates, the other two nodes."""

from __future__ import annotations

import json

import pytest

from ..pack import REPOSITORY
from ..server import FRONT_END_ROOT
from .user import OURS, build, click_title, picture_of, queue, set_widgets, status

pytestmark = [pytest.mark.comfy, pytest.mark.browser]

PACK = "comfyui-vc-attention"  # its folder in custom_nodes
VUE = "Comfy.VueNodes.Enabled"


def test_the_page_is_the_one_asked_for(editor):
    """With FRONT_END_ROOT another frontend than ComfyUI's own; nothing else would show that it came."""
    from importlib.metadata import version

    shown = editor.js("() => window.__COMFYUI_FRONTEND_VERSION__")
    assert (shown == version("comfyui_frontend_package")) is (FRONT_END_ROOT == "")


def row(editor) -> dict:
    """The first patch node's status row as it is drawn."""
    return editor.js(
        f"""() => {{
            const {{ element }} = vc.widget({OURS}[0], "vc_attention_status");
            const color = getComputedStyle(element).borderLeftColor;
            const {{ width, height }} = element.getBoundingClientRect();
            return {{ rgb: color.match(/[\\d.]+/g).slice(0, 3).map(Number), width, height, title: element.title,
                     text: element.innerText }};
        }}"""
    )


@pytest.fixture(params=[False, True], ids=["canvas", "vue"])
def renderer(editor, request):
    """Both of the frontend's renderers of nodes."""
    setter = "([name, on]) => app.extensionManager.setting.set(name, on)"
    editor.js(setter, [VUE, request.param])
    yield editor
    editor.js(setter, [VUE, False])


def test_colours_of_the_status(renderer):
    """Gray before, orange where nothing was accelerated, green where something was; the cause under the pointer."""
    build(renderer, prefix=f"colour-{renderer.js('name => app.extensionManager.setting.get(name)', VUE)}", steps=2)
    red, green, blue = row(renderer)["rgb"]
    assert max(red, green, blue) - min(red, green, blue) < 40, "gray"
    set_widgets(renderer, min_tokens=1_000_000)
    assert queue(renderer) == "execution_success"
    idle = row(renderer)
    red, green, blue = idle["rgb"]
    assert red > green + 60 > blue + 60, "orange"
    assert "min_tokens" in idle["text"]
    assert "ACTIVE ON 0 %" in idle["title"]
    set_widgets(renderer, min_tokens=64)
    assert queue(renderer) == "execution_success"
    active = row(renderer)
    red, green, blue = active["rgb"]
    assert green > max(red, blue) + 60, "green"
    assert "8-bit" in active["title"]
    assert active["width"] > 150
    assert active["height"] > 20


def test_a_node_set_to_off_does_not_show_its_last_render(editor):
    build(editor, prefix="off")
    assert queue(editor) == "execution_success"
    assert "8 of 16 calls" in status(editor)
    set_widgets(editor, mode="off")
    assert queue(editor) == "execution_success"
    assert status(editor).strip() == "off"


def test_a_fault_in_mid_render_is_orange(editor):
    """Some calls were accelerated before it, and that is no reason for green."""
    build(editor, prefix="fault")
    assert queue(editor) == "execution_success"
    editor.js(
        """async () => {
            const { statuses } = await (await app.api.fetchApi("/vc_attention/status")).json();
            const last = statuses.find((status) => status.workflow === app.graph.id);
            const fault = { ...last, state: "running", lines: [], accelerated: 3, fault: "failed: KeyError: 'tile'" };
            app.api.dispatchCustomEvent("vc_attention.status", fault);
        }"""
    )
    shown = row(editor)
    red, green, blue = shown["rgb"]
    assert red > green + 60 > blue + 60, "orange"
    assert "calls: failed: KeyError: 'tile'" in shown["text"]
    assert "3 of 11 calls" in shown["text"]


def test_the_row_takes_the_theme(editor):
    """Dark text on a light ground with ComfyUI's light palette, the other way round with the dark one."""
    build(editor, prefix="theme")

    def brightness() -> tuple[float, float]:
        return tuple(
            editor.js(
                f"""() => {{
                    const style = getComputedStyle(vc.widget({OURS}[0], "vc_attention_status").element);
                    const mean = (color) => color.match(/[\\d.]+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0) / 3;
                    return [mean(style.color), mean(style.backgroundColor)];
                }}"""
            )
        )

    setter = "palette => app.extensionManager.setting.set('Comfy.ColorPalette', palette)"
    text, ground = brightness()
    assert text > ground + 80
    editor.js(setter, "light")
    try:
        editor.pause(500)
        text, ground = brightness()
        assert ground > text + 80
    finally:
        editor.js(setter, "dark")


def test_the_status_comes_back_after_a_reload(editor, server):
    build(editor, prefix="reload")
    assert queue(editor) == "execution_success"
    saved = editor.workflow()
    editor.open(server.address)
    editor.js("saved => app.loadGraphData(saved)", saved)
    editor.wait(f"() => vc.status({OURS}[0]).includes('8 of 16 calls')")


UNNAMED = "00000000-0000-0000-0000-000000000000"


def test_a_prompt_of_a_program_leaves_the_row_alone(editor, server):
    """It names no workflow, and its node ids are those of some other graph."""
    build(editor, prefix="program")
    editor.js("() => { vc.heard = 0; app.api.addEventListener('vc_attention.status', () => { vc.heard += 1; }); }")
    assert server.run(editor.prompt()).ending == "execution_success"
    editor.wait("() => vc.heard >= 2")
    assert status(editor).strip() == "no render yet"
    assert editor.js("() => app.graph.id") != UNNAMED


def test_a_graph_without_a_name_shows_its_own_renders(editor):
    """A graph that was just cleared names no workflow either; the page that queued it is known."""
    build(editor, prefix="unnamed")
    editor.js("id => { app.graph.id = id; }", UNNAMED)
    assert queue(editor) == "execution_success"
    assert "8 of 16 calls" in status(editor)
    sent = "async () => (await (await app.api.fetchApi('/vc_attention/status')).json()).statuses.at(-1)"
    assert editor.js(sent)["workflow"] is None


def test_the_log_level_is_in_the_settings_dialog(editor):
    def choose(page, level: str) -> tuple[int, dict]:
        page.locator("[role=dialog]").get_by_text("VC Attention", exact=True).first.click()
        page.locator("[role=dialog] [role=combobox]").last.click()
        with page.expect_response(lambda response: "/vc_attention/log_level" in response.url) as answer:
            page.get_by_role("option", name=level, exact=True).click()
        return answer.value.status, json.loads(answer.value.request.post_data)

    editor.js("() => { app.extensionManager.command.execute('Comfy.ShowSettingsDialog'); }")
    editor.do(lambda page: page.locator("[role=dialog]").first.wait_for())
    assert editor.do(lambda page: choose(page, "debug")) == (200, {"level": "debug"})
    assert editor.js("() => app.extensionManager.setting.get('VCAttention.LogLevel')") == "debug"
    editor.pause(300)
    assert editor.do(lambda page: choose(page, "as ComfyUI's own")) == (200, {"level": "default"})


TEMPLATES = sorted(path.stem for path in (REPOSITORY / "workflows").glob("*.json"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_clicked_in_the_template_browser(editor, name):
    editor.js("() => { app.extensionManager.command.execute('Comfy.BrowseTemplates'); }")

    def click(page):
        dialog = page.locator("[role=dialog]").last
        dialog.get_by_text(PACK, exact=True).first.click()
        card = dialog.get_by_text(name, exact=True).last
        card.wait_for()
        shown = "[...document.querySelectorAll('[role=dialog] img')].filter((image) => image.naturalWidth > 0)"
        page.wait_for_function(f"() => {shown}.length === {len(TEMPLATES)}")
        card.click()

    editor.do(click)
    editor.wait(f"() => {OURS}.length > 0")
    stored = json.loads((REPOSITORY / "workflows" / f"{name}.json").read_text(encoding="utf-8"))
    assert editor.js("() => app.graph._nodes.length") == len(stored["nodes"])


def test_report_and_compare_in_a_render(editor, server):
    """Behind the sampler, and on two clips of one colour each: their pictures are on the nodes, their texts fit."""
    build(editor, prefix="reported")
    editor.js(
        """() => {
            const add = (type, pos, widgets) => Object.assign(vc.addNode({ type, widgets }), { pos });
            const report = add("VCAttentionReport", [440, 460]);
            report.setSize([760, 460]);
            const text = add("PreviewAny", [1340, 80]);
            const [gray, white] = [0x808080, 0xffffff].map((color, index) =>
                add("EmptyImage", [1340, 400 + 200 * index], { width: 64, height: 64, batch_size: 3, color }));
            const compare = add("VCAttentionCompare", [1740, 400]);
            const [sampler] = vc.byType("KSampler"), [save] = vc.byType("SaveLatent");
            sampler.connect(0, report, "latent");
            report.connect(0, save, "samples");
            report.connect(2, text, 0);
            gray.connect(0, compare, "reference");
            white.connect(0, compare, "other");
        }"""
    )
    assert queue(editor) == "execution_success"
    editor.js("() => vc.fit()")  # a node that is not on the screen loads no picture
    for kind in ("VCAttentionReport", "VCAttentionCompare"):
        editor.wait("kind => vc.byType(kind)[0].imgs?.[0]?.naturalWidth > 0", kind)
    editor.js("() => vc.view(-200, -360)")
    picture_of(editor, "VCAttentionReport", "node-report")
    _, history = server.get("/history")
    outputs = max(history.values(), key=lambda entry: entry["prompt"][0])["outputs"]
    (report,) = [json.loads(output["text"][0]) for output in outputs.values() if "text" in output]
    (run,) = report["runs"]
    assert (run["accelerated"], run["steps"]) == (8, 4)
    assert all(0 < row["removed_energy"][0] < 1 for row in run["rows"] if row["block"] is not None)


def test_the_row_is_seen_inside_an_opened_subgraph(editor):
    build(editor, prefix="opened")
    click_title(editor)
    editor.press("Control+Shift+e")
    editor.pause(800)
    assert queue(editor) == "execution_success"
    editor.js(
        """() => {
            const outer = app.graph._nodes.find((node) => node.subgraph);
            app.canvas.openSubgraph(outer.subgraph, outer);
        }"""
    )
    editor.wait("() => [...document.querySelectorAll('.vc-attention-status')].some((row) => row.offsetParent !== null)")
    assert "8 of 16 calls" in editor.do(lambda page: page.inner_text(".vc-attention-status:visible"))
