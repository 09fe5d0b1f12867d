"use strict";
// The report's cursor on charts and its viewer of transcripts. All text reaches the page as text nodes: nothing that a game or a
// model wrote is ever read as HTML.

const data = JSON.parse(document.getElementById("data").textContent);

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function shown(value, unit) {
  if (unit === "share") return (100 * value).toFixed(1) + " %";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 100000)) return value.toExponential(2);
  return size >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toPrecision(3);
}

// Charts: the pointer, or the arrow keys, read the values at a step.

function setUpChart(figure) {
  const chart = data.charts[figure.dataset.chart];
  const { left, right, width } = data.geometry;
  const [low, high] = chart.x;
  const steps = [...new Set(chart.series.flatMap((series) => series.points.map((point) => point[0])))].sort((a, b) => a - b);
  const svg = figure.querySelector(":scope > svg"), line = svg.querySelector(".cursor"), output = figure.querySelector("output");
  let at = steps.length - 1;

  function show(index) {
    at = Math.max(0, Math.min(steps.length - 1, index));
    const step = steps[at], x = left + ((step - low) / (high - low)) * (width - left - right);
    line.setAttribute("x1", x);
    line.setAttribute("x2", x);
    const parts = chart.series.flatMap((series) => {
      const point = series.points.find((one) => one[0] === step);
      return point ? [`${series.name} ${shown(point[1], chart.unit)}`] : [];
    });
    output.textContent = `step ${step}: ${parts.join(", ")}`;
  }
  function hide() {
    line.setAttribute("x1", -9);
    line.setAttribute("x2", -9);
    output.textContent = "";
  }
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const step = low + (((event.clientX - box.left) / box.width) * width - left) / (width - left - right) * (high - low);
    show(steps.reduce((best, one, index) => (Math.abs(one - step) < Math.abs(steps[best] - step) ? index : best), 0));
  });
  svg.addEventListener("pointerleave", hide);
  figure.addEventListener("blur", hide);
  figure.addEventListener("focus", () => show(at));
  figure.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: steps.length - 1 };
    if (event.key in moves) {
      show(moves[event.key]);
      event.preventDefault();
    }
  });
}

// Transcripts.

const MODES = {
  trained: {
    name: "trained",
    legend: "underlined and tinted: trained; grey: the prompt, never trained; plain bold: a reply that is not trained",
  },
  advantage: {
    name: "advantage",
    legend: "blue, solid line: sampled more often; orange, dashed line: less often; strength by size",
  },
  difference: {
    name: "logprob difference",
    legend: "trainer's logprob less vLLM's: blue, likelier to the trainer; orange, dashed: less likely; full at 0.5 nats",
  },
  version: { name: "policy version", legend: "a colour for each version of the weights, in turn" },
  probability: { name: "probability", legend: "green by the probability with which vLLM sampled the token" },
};
const HUES = 6;

function setUpViewer(viewer) {
  const find = (name) => viewer.querySelector(`[data-part="${name}"]`);
  const picker = find("episode"), filter = find("filter"), modes = find("modes"), stream = find("stream"), scale = find("scale");
  let tokens = [], here = -1, mode = "trained", episode = null, isReady = false;

  function matches(one) {
    const isOf = {
      all: true, train: one.kind === "train", eval: one.kind === "eval", trained: one.steps.length > 0, won: one.won, notwon: !one.won,
    };
    return isOf[filter.value];
  }

  function fill() {
    picker.replaceChildren();
    data.episodes.forEach((one, index) => {
      if (matches(one)) picker.append(new Option(label(one), index));
    });
    open();
  }

  function label(one) {
    const kind = one.kind === "eval" ? "held out" : "training";
    return `${one.file.replace(".json", "")}  ${kind}  ${one.game}  ${ending(one)}`;
  }

  function open() {
    episode = picker.value === "" ? null : data.episodes[picker.value];
    tokens = [];
    here = -1;
    stream.replaceChildren();
    find("about").replaceChildren();
    find("token").replaceChildren();
    if (!episode) {
      find("about").append(element("p", "soft", "No episode of this kind."));
      return;
    }
    describe(find("about"));
    episode.turns.forEach(addTurn);
    const last = element("section", "turn");
    last.append(element("h4", "", "last observation"), element("div", "stream", episode.last_observation || ""));
    stream.append(last);
    paint();
    move(tokens.findIndex((token) => token.isReply), false);
    remember();
  }

  // The address names episode and mode, so that a link to what is on the screen can be passed on.
  function remember() {
    if (isReady) history.replaceState(null, "", "#" + new URLSearchParams({ episode: episode.file.replace(".json", ""), colours: mode }));
  }

  function recall() {
    const wanted = new URLSearchParams(location.hash.slice(1));
    const named = data.episodes.findIndex((one) => one.file === wanted.get("episode") + ".json");
    // Nothing was asked for: the first that was trained has colours to show.
    const index = named >= 0 ? named : data.episodes.findIndex((one) => one.steps.length > 0);
    if (wanted.get("colours") in MODES) setMode(wanted.get("colours"));
    if (index >= 0) {
      picker.value = index;
      open();
      if (named >= 0) viewer.scrollIntoView();
    }
  }

  function describe(about) {
    const facts = [
      ending(episode), `score ${episode.score} of ${episode.max_score}`, `return ${number(episode.episode_return)}`,
      `${episode.num_tokens} tokens, ${episode.num_trained} sampled`, `versions ${episode.oldest_version} to ${episode.newest_version}`,
      `group ${episode.group_id}`, `seed ${episode.seed}`,
    ];
    if (episode.group_rewards) {
      facts.push(`reward ${number(episode.reward)} among ${episode.group_rewards.map(number).join(", ")}`);
      facts.push(`group advantage ${number(episode.advantage)}`);
    }
    about.append(element("p", "", facts.join(" / ")), element("p", "soft", trainedHow()));
  }

  function trainedHow() {
    if (episode.kind === "eval") return "An evaluation: nothing of it is trained, so it has neither advantages nor trainer's logprobs.";
    if (episode.outcome === "zero_std") return "Not trained: all rewards of its group are alike, which gives no signal.";
    if (episode.outcome === "rejected") return "Not trained: nothing in its group could be.";
    if (episode.steps.length) {
      const steps = episode.steps.map((step) => step + 1).join(", ");
      return `Trained in optimizer step ${steps}; the trainer's logprobs are those of its first time.`;
    }
    if (episode.outcome === "samples") return "The trainer left no logprobs of it: it was not trained yet, or dropped as too old.";
    return "This run recorded neither advantages nor the trainer's logprobs.";
  }

  function addTurn(turn, index) {
    const section = element("section", "turn"), line = element("div", "stream");
    const became = turn.command === null ? "no command" : `command "${turn.command}"`;
    section.append(element("h4", "", `turn ${index + 1}: ${became}, reward ${number(turn.reward)}, ended by ${turn.finish}`));
    turn.prompt.forEach((text, place) => addToken(line, text, { turn: index, id: value(turn.promptIds, place), isReply: false }));
    turn.tokens.forEach((text, place) => {
      const logprob = value(turn.logprobs, place), trainer = value(turn.trainer, place);
      addToken(line, text, {
        turn: index, isReply: true, id: value(turn.ids, place), logprob, trainer,
        difference: trainer === null || logprob === null ? null : trainer - logprob,
        version: value(turn.versions, place), advantage: value(turn.advantages, place),
      });
    });
    section.append(line);
    stream.append(section);
  }

  function addToken(line, text, facts) {
    const span = element("span", "token", text);
    span.dataset.index = tokens.length;
    tokens.push({ ...facts, text, span, isTrained: facts.isReply && facts.advantage !== null });
    line.append(span);
  }

  function paint() {
    const largest = Math.max(1e-9, ...tokens.filter((token) => token.isTrained).map((token) => Math.abs(token.advantage)));
    for (const token of tokens) {
      const classes = ["token", token.isReply ? "reply" : "prompt"];
      let share = 0;
      if (token.isTrained) classes.push("trained");
      if (mode === "trained" && token.isTrained) {
        share = 0.25;
        classes.push("even");
      }
      if (mode === "advantage" && token.isTrained) share = signed(classes, token.advantage, largest);
      if (mode === "difference" && token.isReply && token.difference !== null) share = signed(classes, token.difference, 0.5);
      if (mode === "probability" && token.isReply && token.logprob !== null) {
        share = 0.75 * Math.exp(token.logprob);
        classes.push("even");
      }
      if (mode === "version" && token.isReply && token.version !== null) classes.push(`hue${token.version % HUES}`);
      token.span.className = classes.join(" ");
      token.span.style.setProperty("--share", share.toFixed(3));
    }
    scale.replaceChildren(document.createTextNode(legend()));
    if (here >= 0) tokens[here].span.classList.add("here");
  }

  function signed(classes, amount, largest) {
    classes.push(amount < 0 ? "minus" : "plus");
    return amount === 0 ? 0 : 0.12 + 0.68 * Math.min(1, Math.abs(amount) / largest);
  }

  function legend() {
    const missing = mode === "difference" && !tokens.some((token) => token.difference !== undefined && token.difference !== null);
    return missing ? "No token of this episode has a logprob of the trainer. " + trainedHow() : MODES[mode].legend;
  }

  function move(index, shouldScroll) {
    if (!tokens.length) return;
    if (here >= 0) tokens[here].span.classList.remove("here");
    here = Math.max(0, Math.min(tokens.length - 1, index));
    const token = tokens[here];
    token.span.classList.add("here");
    if (shouldScroll) token.span.scrollIntoView({ block: "nearest" });
    const rows = [["text", JSON.stringify(token.text)], ["id", token.id], ["turn", token.turn + 1], ["trained", isTrained(token)]];
    if (token.isReply) {
      const ratio = token.difference === null ? "-" : Math.exp(token.difference).toFixed(3);
      rows.push(["version", token.version], ["advantage", number(token.advantage)]);
      rows.push(["vLLM", nats(token.logprob)], ["trainer", nats(token.trainer)], ["difference", nats(token.difference)], ["ratio", ratio]);
    }
    const list = element("dl");
    for (const [name, text] of rows) list.append(element("dt", "", name), element("dd", "", text === null ? "-" : String(text)));
    find("token").replaceChildren(list);
  }

  function isTrained(token) {
    if (token.isReply && episode.kind === "train" && episode.outcome === null) return "not recorded";
    return token.isTrained ? "yes" : "no";
  }

  function moveReply(direction) {
    for (let index = here + direction; index >= 0 && index < tokens.length; index += direction) {
      if (tokens[index].isReply) return move(index, true);
    }
  }

  function turnPage(direction) {
    const next = picker.selectedIndex + direction;
    if (next >= 0 && next < picker.options.length) {
      picker.selectedIndex = next;
      open();
    }
  }

  function setMode(name) {
    mode = name;
    modes.querySelector(`[value="${name}"]`).checked = true;
    paint();
    if (episode) remember();
  }

  Object.entries(MODES).forEach(([name, { name: text }], index) => {
    const choice = element("label"), radio = element("input");
    Object.assign(radio, { type: "radio", name: "mode", value: name, checked: name === mode });
    radio.addEventListener("change", () => setMode(name));
    choice.append(radio, document.createTextNode(`${text} `), element("kbd", "keys", index + 1));
    modes.append(choice);
  });
  filter.addEventListener("change", fill);
  picker.addEventListener("change", open);
  find("previous").addEventListener("click", () => turnPage(-1));
  find("next").addEventListener("click", () => turnPage(1));
  for (const kind of ["pointerover", "click"]) {
    stream.addEventListener(kind, ({ target }) => target.dataset.index !== undefined && move(Number(target.dataset.index), false));
  }
  viewer.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || ["SELECT", "INPUT"].includes(event.target.tagName)) return;
    const keys = {
      ArrowLeft: () => move(here - 1, true), ArrowRight: () => move(here + 1, true),
      p: () => moveReply(-1), n: () => moveReply(1), j: () => turnPage(1), k: () => turnPage(-1),
    };
    Object.keys(MODES).forEach((name, index) => (keys[index + 1] = () => setMode(name)));
    if (event.key in keys) {
      keys[event.key]();
      event.preventDefault();
    }
  });
  fill();
  recall();
  isReady = true;
}

function ending(one) {
  return one.won ? "won" : one.lost ? "lost" : one.truncated ? "cut" : "ended";
}

function value(list, place) {
  return list && place < list.length ? list[place] : null;
}

function number(amount) {
  return amount === null || amount === undefined ? "-" : String(Math.round(amount * 1000) / 1000);
}

function nats(amount) {
  return amount === null || amount === undefined ? "-" : amount.toFixed(3);
}

document.querySelectorAll(".chart").forEach(setUpChart);
document.querySelectorAll("[data-part=viewer]").forEach(setUpViewer);
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => (one.open = true)));
document.documentElement.dataset.ready = "yes";
