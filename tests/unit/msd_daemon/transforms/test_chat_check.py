"""Chat templates before a job starts: what is refused, what is said, what hostile ones can do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from federation.model.recipe import ChatRule
from msd_client.contract.errors import ConfigError
from msd_daemon.sources.record_fault import RecordFault
from msd_daemon.transforms import describe_tokenizer, open_tokenizer
from msd_daemon.transforms.chat_check import check_template
from msd_daemon.transforms.chat_template import ChatTemplate, find_chat_template
from tests.support import chat_templates as templates

BYTES = open_tokenizer(describe_tokenizer(None, kind="bytes", eos="none"))
CHAT = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]


def report(template: str, train_on="assistant"):
    return check_template(ChatRule(template=template, train_on=train_on), BYTES)


def test_good_templates_are_told_in_notes() -> None:
    found = report(templates.CHATML)
    assert found.faults == ()
    assert found.notes == (
        "turns are told by rendering beginnings, as the template has no generation tags",
        "trained of an answer: 'Aone answers<|im_end|>\\n'",
        (
            "no special tokens of the tokenizer, encoded as plain text: <|im_start|> (12 tokens), "
            "<|im_end|> (10 tokens)"
        ),
    )
    found = report(templates.TAGGED)
    assert found.faults == ()
    assert found.notes[:2] == (
        "turns are told by the template's generation tags",
        "trained of an answer: 'Aone answers<|im_end|>'",
    )
    set_eos = "{% set bos_token, eos_token = 'B', 'E' %}\n"
    found = report(set_eos + templates.MISTRAL)
    assert found.faults == ()
    assert "system messages are refused by the template" in found.notes[2]
    assert report(templates.QWEN3, "last").faults == ()
    assert report(templates.QWEN3, "all").notes[0] == "every token of a chat is trained"


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        (templates.QWEN3, ("a chat of 4 messages", "messages 0 to 1", "or train_on: last")),
        ("{% set eos_token = '</s>' %}\n" + templates.PHI3, ("a chat of 4 messages", "</s>"[1:])),
        ("{{ strftime_now('%d') }}" + templates.CHATML, ("templates have no clock",)),
        ("{% if messages %}{{ 1", ("cannot be read at line 1", "mend the Jinja text")),
        ("nothing", ("leaves out what the assistant says",)),
        (
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
            ("what others say would be trained", "{% generation %}"),
        ),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}{% endgeneration %}",
            ("what the assistant says would not be trained",),
        ),
    ],
)
def test_bad_templates_are_refused_by_name(template: str, parts: tuple[str, ...]) -> None:
    (fault,) = report(template).faults
    for part in parts:
        assert part in fault


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(100001) %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for a in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=[1]) %}{% for a in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|tojson }}",
        "{% set ns = namespace(x=[1]) %}{% for a in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|string }}",
        "{% set ns = namespace(x=9) %}{% for a in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{{ 'x' * 99999999999 }}",
        "{{ [1] * 99999999999 }}",
        "{{ 9 ** 99999999999 }}",
        "{{ '%99999999999d' % 1 }}",
        "{{ '{:99999999999}'.format(1) }}",
        "{{ 'x'.ljust(99999999999) }}",
        "{{ 'x'|center(99999999999) }}",
        "{{ messages|tojson(indent=99999999999) }}",
        "{{ 'x'|indent(99999999999) }}",
        "{{ ('x' * 9999).replace('x', 'x' * 99999) }}",
        "{{ ('x' * 9999)|replace('x', 'x' * 99999) }}",
        "{{ (['x' * 99999] * 9999)|join }}",
        "{{ ('x' * 99999).join(['x'] * 9999) }}",
        "{{ (1).to_bytes(99999999999) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in range(99999) %}" + "text " * 500 + "{% endfor %}",
        "{% set x %}{% for a in range(99999) %}" + "text " * 500 + "{% endfor %}{% endset %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.json }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ messages.append(1) }}",
        "{{ lipsum() }}",
        "{{ [1, 2, 3]|random }}",
        "{{ raise_exception }}",
        "{{ messages|map('upper') }}",
        "{{ [1]|batch(99999999999, 'x')|list }}",
        "{{ unknown.attribute }}",
        "{{ 1 // 0 }}",
    ],
)
def test_hostile_templates_end_soon_as_faults_of_their_chat(template: str) -> None:
    with pytest.raises((RecordFault, ConfigError)) as caught:
        ChatTemplate(template).render(CHAT, None)
    assert str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_rendering_does_not_use_up_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{% for a in range(1000) %}{{ messages[0].content }}{% endfor %}")
    monkeypatch.setattr("msd_daemon.transforms.chat_template.RENDER_WORK_MAX", 60_000)
    for _ in range(3):
        assert len(template.render(CHAT, None).text) == 1000
    with pytest.raises(RecordFault, match="units of work"):
        template.render([{"role": "user", "content": "x" * 100}], None)


def test_what_published_templates_use_is_there() -> None:
    text = (
        "{%- set ns = namespace(n=0) -%}"
        "{%- for m in messages -%}{%- if loop.index0 == 1 -%}{%- break -%}{%- endif -%}"
        "{%- set ns.n = ns.n + 1 -%}{{ m['role']|capitalize }}{{ m.get('content', '') }}"
        "{%- endfor -%}"
        "{{ ns.n % 2 == 1 }} {{ messages[1:]|length }} {{ messages[::-1][0].content }} "
        "{{ messages|selectattr('role', 'equalto', 'user')|list|length }} "
        "{{ messages|map(attribute='content')|join(', ') }} {{ {'a': 'é<'}|tojson }} "
        "{{ {'a': 'é'}|tojson(ensure_ascii=True) }} {{ ' a '.strip().split('a')|length }} "
        "{%- macro say(x) -%}<{{ x|trim }}>{%- endmacro -%}{{ say(' q ') }}"
        "{{ 'a' ~ 1 ~ none }} {{ tools is none }} {{ bos_token }}|{{ 'x' if 'x' in messages[0].content else 'z' }}"
        " {{ messages[0] is mapping }} {{ messages[0].content is string }} {{ {'b': 1, 'a': 2}.items()|list }}"
    )
    assert ChatTemplate(text).render(CHAT, None).text == (
        'Userx' 'True 1 y 1 x, y {"a": "é<"} {"a": "\\u00e9"} 2<q>a1None True |x True True '
        "[('b', 1), ('a', 2)]"
    )  # fmt: skip


def test_names_are_hidden_in_json_too() -> None:
    template = ChatTemplate("{{ messages|tojson(ensure_ascii=True) }}", ["<s>"])
    rendered = template.render([{"role": "user", "content": "\\<s>\\\\<s>"}], None)
    assert json.loads(rendered.text) == [{"role": "user", "content": "\\<s>\\\\<s>"}]
    assert [rendered.text[begin:end] for begin, end in rendered.plain] == ["<s>", "<s>"]


def test_templates_lie_beside_tokenizers_as_transformers_has_them(tmp_path: Path) -> None:
    assert find_chat_template(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": "x"}))
    assert find_chat_template(tmp_path) is None
    config.write_text(json.dumps({"chat_template": "one"}))
    assert find_chat_template(tmp_path / "tokenizer.json") == "one"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "two"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert find_chat_template(tmp_path) == "two"
    config.write_text(json.dumps({"chat_template": named[:1]}))
    with pytest.raises(ConfigError, match="has chat templates tool_use but no default"):
        find_chat_template(tmp_path)
    config.write_text(json.dumps({"chat_template": 3}))
    with pytest.raises(ConfigError, match="that is no text"):
        find_chat_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("three\n")
    assert find_chat_template(tmp_path) == "three\n"
