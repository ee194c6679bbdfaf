// SPDX-License-Identifier: Apache-2.0
#include "yoke/flow/words.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <thread>

#include "yoke/base/error.h"
#include "yoke/base/rng.h"
#include "yoke/base/text.h"

namespace yoke::flow {
namespace {

// "batch=64,classes=3".
struct Arguments {
  std::string word = {};
  std::map<std::string, double> named = {};

  Arguments(const std::string& text, const std::map<std::string, double>& defaults)
      : named(defaults) {
    const size_t colon = text.find(':');
    word = text.substr(0, colon);
    if (colon == text.npos) return;
    std::vector<std::string> forms;  // "by=2"
    for (const auto& [name, value] : defaults) forms.push_back(cat(name, "=", value));
    const std::string takes =
        forms.empty() ? cat("'", word, "' takes no arguments")
                      : cat("'", word, "' takes ", join(forms, ", "), ", as ", word, ":", forms[0]);
    std::vector<std::string> said;
    for (const auto& part : split(text.substr(colon + 1), ',')) {
      const size_t equals = part.find('=');
      if (equals == part.npos)
        fail(Kind::Config, "'", text, "': got '", part, "', which names no argument; ", takes);
      const std::string name = part.substr(0, equals), value = part.substr(equals + 1);
      if (!named.contains(name))
        fail(Kind::Config, "'", text, "': no argument '", name, "'; ", takes);
      if (std::ranges::count(said, name) > 0)
        fail(Kind::Config, "'", text, "': '", name, "' is said twice; ", takes);
      said.push_back(name);
      char* end = nullptr;
      const double number = std::strtod(value.c_str(), &end);
      if (value.empty() || *end != '\0' || !std::isfinite(number))
        fail(Kind::Config, "'", text, "': '", part, "' wants a number");
      named[name] = number;
    }
  }
  double number(const std::string& name) const { return named.at(name); }
  int64_t count(const std::string& name, int64_t least = 1) const {
    const double value = named.at(name);
    if (value != std::floor(value) || value < double(least) || value > 1e9)
      fail(Kind::Config, "'", word, "': ", name, " = ", value, ", wanted a whole number from ",
           least);
    return int64_t(value);
  }
};

Open simple(std::function<at::Tensor(const Tensors&)> run) { return function(std::move(run)); }

// ---- data ----

struct Points {
  at::Tensor x = {}, label = {};
};

// Arms of a spiral, one for each class, with noise.
Points spirals(int64_t count, int64_t classes, double noise, const Rng& rng) {
  Points points{at::empty({count, 2}), at::empty({count}, at::kLong)};
  auto* const x = points.x.mutable_data_ptr<float>();
  auto* const label = points.label.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    const auto at = uint64_t(i) * 4;
    label[i] = i % classes;
    const double radius = 0.1 + 0.9 * rng.uniform(at);
    const double angle = 2 * std::numbers::pi * double(label[i]) / double(classes) + 4 * radius +
                         noise * rng.normal(at + 1);
    x[2 * i] = float(radius * std::cos(angle)), x[2 * i + 1] = float(radius * std::sin(angle));
  }
  return points;
}

// A batch of a fixed set of points each firing; of a bag: of points drawn from it once, with some
// of them twice and some not at all.
Word points_word(const Arguments& is, uint64_t seed, bool held_out) {
  const int64_t batch = is.count("batch"), count = is.count("points"),
                classes = is.count("classes", 2);
  const int64_t bag = is.count("bag", 0);
  const double noise = is.number("noise");
  Word word{.outputs = {"x", "label"}};
  word.open = [=](at::Device device) {
    auto all = spirals(count, classes, noise, Rng(seed, held_out ? "held out" : "points"));
    if (bag > 0) {
      const Rng rng(seed, cat("bag ", bag));
      auto rows = at::empty({count}, at::kLong);
      for (int64_t i = 0; i < count; ++i)
        rows.mutable_data_ptr<int64_t>()[i] = int64_t(rng.below(uint64_t(i), uint64_t(count)));
      all = {all.x.index_select(0, rows), all.label.index_select(0, rows)};
    }
    all = {all.x.to(device), all.label.to(device)};
    return Body{.run = [=](const Tensors&, int64_t firing) -> Tensors {
      if (held_out || batch >= count) return {all.x, all.label};
      const Rng rng(seed, cat("batch ", bag), uint64_t(firing));
      auto rows = at::empty({batch}, at::kLong);
      for (int64_t i = 0; i < batch; ++i)
        rows.mutable_data_ptr<int64_t>()[i] = int64_t(rng.below(uint64_t(i), uint64_t(count)));
      rows = rows.to(device);
      return {all.x.index_select(0, rows), all.label.index_select(0, rows)};
    }};
  };
  return word;
}

Word noise_word(const Arguments& is, uint64_t seed, const std::string& key, bool circle) {
  const int64_t batch = is.count("batch"), dim = circle ? 2 : is.count("dim");
  Word word{.outputs = {"y"}};
  word.open = [=](at::Device device) {
    return Body{.run = [=](const Tensors&, int64_t firing) -> Tensors {
      const Rng rng(seed, key, uint64_t(firing));
      auto values = at::empty({batch, dim});
      auto* const at = values.mutable_data_ptr<float>();
      for (int64_t i = 0; i < batch * dim; ++i) at[i] = float(rng.normal(uint64_t(i) * 2));
      if (circle) values = values / values.norm(2, 1, true) + 0.05 * values;
      return {values.to(device)};
    }};
  };
  return word;
}

// ---- models ----

Word mlp_word(const std::string& text, uint64_t seed, const std::string& key) {
  std::vector<int64_t> sizes;
  const size_t colon = text.find(':');
  for (const auto& part : split(colon == text.npos ? "" : text.substr(colon + 1), ',')) {
    const auto size = parse_int(part);
    if (!size || *size < 1 || *size > 1'000'000'000)
      fail(Kind::Config, "'", text, "': got '", part,
           "', and an mlp wants its sizes, whole numbers from 1, input to output, as mlp:2,32,3");
    sizes.push_back(*size);
  }
  if (sizes.size() < 2)
    fail(Kind::Config, "'", text, "' wants two sizes or more, input to output, as mlp:2,32,3");
  Word word{.inputs = {"x"}, .outputs = {"y"}};
  word.open = [sizes, seed, key](at::Device device) {
    Body body;
    for (size_t i = 0; i + 1 < sizes.size(); ++i) {
      const Rng rng(seed, cat(key, ".", i));
      auto weight = at::empty({sizes[i + 1], sizes[i]});
      const double scale = 1 / std::sqrt(double(sizes[i]));
      for (int64_t k = 0; k < weight.numel(); ++k)
        weight.mutable_data_ptr<float>()[k] = float(scale * rng.normal(uint64_t(k) * 2));
      body.weights.push_back(weight.to(device).requires_grad_());
      body.weights.push_back(at::zeros({sizes[i + 1]}, device).requires_grad_());
    }
    for (const auto& weight : body.weights) body.bytes += weight.nbytes();
    body.run = [weights = body.weights](const Tensors& inputs, int64_t) -> Tensors {
      auto x = inputs[0];
      for (size_t i = 0; i < weights.size(); i += 2) {
        x = at::linear(x, weights[i], weights[i + 1]);
        if (i + 2 < weights.size()) x = at::tanh(x);
      }
      return {x};
    };
    return body;
  };
  return word;
}

// ---- losses ----

at::Tensor soft_plus_mean(const at::Tensor& logits) { return at::softplus(logits).mean(); }

// What the others are sure of counts as much as the labels (Zhang et al., CVPR 2018).
at::Tensor mutual(const Tensors& in) {
  const auto own = at::log_softmax(in[0], -1);
  const auto others = at::log_softmax(in[1], -1);  // [peers, batch, classes]
  const auto apart = (others.exp() * (others - own.unsqueeze(0))).sum(-1).mean();
  return at::nll_loss(own, in[2]) + apart;
}

// ---- joins ----

at::Tensor vote(const Tensors& in) {
  // Class numbers as they are, the largest of a row of scores.
  Tensors ballots;
  for (const auto& value : in)
    ballots.push_back(value.is_floating_point() && value.dim() > 1 ? value.argmax(-1)
                                                                   : value.to(at::kLong));
  return std::get<0>(at::stack(ballots).mode(0));
}

at::Tensor mean(const Tensors& in) { return at::stack(in).mean(0); }

using Make = std::function<Word(const std::string& text, uint64_t seed, const std::string& key)>;
struct Known {
  std::string word, about;
  Make make;
};

Make fixed(std::vector<std::string> inputs, std::string output,
           std::function<at::Tensor(const Tensors&)> run, bool loss = false) {
  return [=](const std::string& text, uint64_t, const std::string&) {
    const Arguments none(text, {});
    return Word{
        .open = simple(run), .inputs = inputs, .outputs = {output}, .loss = loss ? output : ""};
  };
}

const std::vector<Known>& known() {
  static const std::vector<Known> kKnown{
      {"spirals",
       "points of classes: spirals:batch=64,points=600,classes=3,noise=0.2,bag=0; gives x and "
       "label; bag=K draws a bag of its own",
       [](const std::string& text, uint64_t seed, const std::string&) {
         return points_word(
             Arguments(
                 text,
                 {{"batch", 64}, {"points", 600}, {"classes", 3}, {"noise", 0.2}, {"bag", 0}}),
             seed, false);
       }},
      {"spirals_held_out",
       "the same number of points that no other has seen, all at once; gives x and label",
       [](const std::string& text, uint64_t seed, const std::string&) {
         return points_word(
             Arguments(
                 text,
                 {{"batch", 64}, {"points", 600}, {"classes", 3}, {"noise", 0.2}, {"bag", 0}}),
             seed, true);
       }},
      {"noise", "normal numbers: noise:batch=64,dim=2; gives y",
       [](const std::string& text, uint64_t seed, const std::string& key) {
         return noise_word(Arguments(text, {{"batch", 64}, {"dim", 2}}), seed, key, false);
       }},
      {"circle", "points near the unit circle: circle:batch=64; gives y",
       [](const std::string& text, uint64_t seed, const std::string& key) {
         return noise_word(Arguments(text, {{"batch", 64}}), seed, key, true);
       }},
      {"mlp", "layers with tanh between, by their sizes: mlp:2,32,3; takes x, gives y",
       [](const std::string& text, uint64_t seed, const std::string& key) {
         return mlp_word(text, seed, key);
       }},
      {"cross_entropy", "takes scores x and label, gives loss",
       fixed(
           {"x", "label"}, "loss",
           [](const Tensors& in) { return at::cross_entropy_loss(in[0], in[1]); }, true)},
      {"mutual",
       "cross entropy, and how far the others are: takes x, peers (stacked) and label, gives loss",
       fixed({"x", "peers", "label"}, "loss", mutual, true)},
      {"squared", "takes x and target, gives loss: the mean squared distance",
       fixed(
           {"x", "target"}, "loss", [](const Tensors& in) { return at::mse_loss(in[0], in[1]); },
           true)},
      {"tells_apart", "takes scores of real and fake, gives loss: how badly they are told apart",
       fixed(
           {"real", "fake"}, "loss",
           [](const Tensors& in) { return soft_plus_mean(-in[0]) + soft_plus_mean(in[1]); }, true)},
      {"passes_for_real", "takes scores of fake, gives loss: how little they pass for real",
       fixed(
           {"fake"}, "loss", [](const Tensors& in) { return soft_plus_mean(-in[0]); }, true)},
      {"accuracy", "takes scores or class numbers x and label, gives y: the part that is right",
       fixed({"x", "label"}, "y",
             [](const Tensors& in) { return vote({in[0]}).eq(in[1]).to(at::kFloat).mean(); })},
      {"same", "takes x, gives it as y",
       fixed({"x"}, "y", [](const Tensors& in) { return in[0]; })},
      {"softmax", "takes scores x, gives y",
       fixed({"x"}, "y", [](const Tensors& in) { return at::softmax(in[0], -1); })},
      {"argmax", "takes scores x, gives class numbers y",
       fixed({"x"}, "y", [](const Tensors& in) { return in[0].argmax(-1); })},
      {"nearer", "takes a guess x of the square root of a, gives a nearer one as y",
       fixed({"x", "a"}, "y", [](const Tensors& in) { return (in[0] + in[1] / in[0]) / 2; })},
      {"scale", "takes x, gives it times a number as y: scale:by=2",
       [](const std::string& text, uint64_t, const std::string&) {
         const double by = Arguments(text, {{"by", 2}}).number("by");
         return Word{.open = simple([by](const Tensors& in) { return in[0] * by; }),
                     .inputs = {"x"},
                     .outputs = {"y"}};
       }},
      {"settled",
       "takes old and new, gives y (new) and done, 1 when they differ by less: settled:by=1e-6",
       [](const std::string& text, uint64_t, const std::string&) {
         const double by = Arguments(text, {{"by", 1e-6}}).number("by");
         return Word{.open = function(Function([by](const Tensors& in, int64_t) -> Tensors {
                       return {in[1], (in[0] - in[1]).abs().lt(by).all().to(at::kFloat)};
                     })),
                     .inputs = {"old", "new"},
                     .outputs = {"y", "done"}};
       }},
      {"above", "takes x, gives y: 1 where its mean is above a number: above:than=0.5",
       [](const std::string& text, uint64_t, const std::string&) {
         const double than = Arguments(text, {{"than", 0.5}}).number("than");
         return Word{.open = simple([than](const Tensors& in) {
                       return in[0].mean().gt(than).to(at::kFloat);
                     }),
                     .inputs = {"x"},
                     .outputs = {"y"}};
       }},
      {"sleep", "takes x, sleeps, gives it as y: sleep:ms=5",
       [](const std::string& text, uint64_t, const std::string&) {
         const double ms = Arguments(text, {{"ms", 5}}).number("ms");
         return Word{.open = simple([ms](const Tensors& in) {
                       std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms));
                       return in[0];
                     }),
                     .inputs = {"x"},
                     .outputs = {"y"}};
       }},
  };
  return kKnown;
}

}  // namespace

std::optional<Word> find_word(const std::string& text, uint64_t seed, const std::string& key) {
  const std::string word = text.substr(0, text.find(':'));
  for (const auto& each : known())
    if (each.word == word) return each.make(text, seed, key);
  return std::nullopt;
}

std::string describe_words() {
  std::string text;
  for (const auto& each : known())
    text += cat(each.word, std::string(18 - std::min<size_t>(17, each.word.size()), ' '),
                each.about, "\n");
  return text;
}

std::vector<std::string> word_names() {
  std::vector<std::string> names;
  for (const auto& each : known()) names.push_back(each.word);
  return names;
}

std::vector<std::string> numbered(const std::string& name, size_t count) {
  std::vector<std::string> names;
  for (size_t i = 0; i < count; ++i) names.push_back(cat(name, i));
  return names;
}

Open joins(const std::string& how, std::vector<double> weights) {
  if (how == "mean") return simple(mean);
  if (how == "vote") return simple(vote);
  if (how == "stack") return simple([](const Tensors& in) { return at::stack(in); });
  if (how == "concat")
    return simple([](const Tensors& in) {
      if (in.size() == 1) return in[0];
      return in[0].dim() == 0 ? at::stack(in) : at::cat(in);  // of numbers, a row of them
    });
  if (how == "weighted")
    return simple([weights](const Tensors& in) {
      auto sum = in[0] * weights[0];
      for (size_t i = 1; i < in.size(); ++i) sum = sum + in[i] * weights[i];
      return sum;
    });
  fail(Kind::Config, "no merge '", how, "'; there are: mean, vote, weighted, stack, concat");
}

Open splits(int64_t pieces, bool even) {
  return function(Function([=](const Tensors& in, int64_t) -> Tensors {
    if (in[0].dim() == 0)
      fail(Kind::Usage, "cannot cut one number into ", pieces, " pieces, one for each copy");
    const int64_t rows = in[0].size(0);
    if (even && rows % pieces != 0)
      fail(Kind::Usage, "cannot cut ", rows, " rows evenly over ", pieces,
           " copies, each with a loss of its own: the mean of their losses would count some rows ",
           "more than others; take a multiple of ", pieces, ", or put the loss after the copies");
    return in[0].tensor_split(pieces);
  }));
}

}  // namespace yoke::flow
