"""Chat templates: the conventions they rely on, and clear words when messages do not fit."""

import datetime as dt

import pytest

from router.text.chat import ChatTemplate
from router.text.errors import ChatTemplateError
from router.text.tokenizer import load_model_text

MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "<hi> & ü"}]


def render(source, messages=MESSAGES, **special):
    return ChatTemplate(source, special).render(messages)[0]


def test_blocks_leave_no_lines_of_their_own():
    source = (
        "{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}"
    )
    assert render(source) == "system\nuser\n"


def test_special_tokens_have_their_names():
    assert (
        render("{{ bos_token }}x{{ eos_token }}", bos_token="<s>", eos_token="</s>") == "<s>x</s>"
    )


def test_tojson_writes_characters_as_they_are():
    assert render("{{ messages[1].content | tojson }}") == '"<hi> & ü"'
    assert render("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, indent=1) }}") == (
        '{\n "a": 2,\n "b": 1\n}'
    )


def test_strftime_now_gives_todays_date():
    today = dt.datetime.now().astimezone().strftime("%d %b %Y")
    assert render("{{ strftime_now('%d %b %Y') }}") == today


def test_loops_can_be_left_and_generation_blocks_are_only_text():
    source = (
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert render(source) == "be kind"


def test_tools_and_documents_are_none_and_the_prompt_is_asked_for():
    source = "{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }}"
    assert render(source) == "True True True"


def test_what_the_template_raises_is_told():
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_template_that_stumbles_over_messages_is_told():
    with pytest.raises(ChatTemplateError, match="chat template"):
        render("{{ messages[0].content + 3 }}")
    with pytest.raises(ChatTemplateError, match="no element 7"):
        render("{{ messages[7].content.strip() }}")


def test_the_sandbox_lets_nothing_out():
    for source in (
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__ }}{{ cycler.__init__.__globals__ }}",
    ):
        with pytest.raises(ChatTemplateError):
            render(source)


def test_a_broken_template_is_refused_when_it_is_compiled():
    with pytest.raises(ChatTemplateError, match="chat template is broken"):
        ChatTemplate("{% for %}", {}).compile()


def test_whatever_roles_the_template_knows_may_be_sent():
    source = (
        "{% for m in messages %}{% if m.role == 'tool' %}<result>{{ m.content }}</result>"
        "{% elif m.role in ['system', 'user', 'assistant'] %}[{{ m.role }}]{{ m.content }}"
        "{% else %}{{ raise_exception('no role ' + m.role) }}{% endif %}{% endfor %}"
    )
    called = [*MESSAGES, {"role": "assistant", "content": "f()"}, {"role": "tool", "content": "4"}]
    expected = "[system]be kind[user]<hi> & ü[assistant]f()<result>4</result>"
    assert render(source, called) == expected
    with pytest.raises(ChatTemplateError, match="no role wizard"):
        render(source, [{"role": "wizard", "content": "x"}])


def test_templates_of_built_in_models_are_known_and_no_others(model_path):
    assert load_model_text(model_path).chat_template.is_known
    assert not ChatTemplate("{{ messages }}", {}).is_known
