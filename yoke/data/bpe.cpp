// SPDX-License-Identifier: Apache-2.0
#include "yoke/data/bpe.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>

#include "yoke/base/error.h"
#include "yoke/data/utf8.h"

namespace yoke::data {
namespace {

constexpr uint32_t kNever = ~uint32_t{0};  // the rank of no merge
constexpr uint64_t kFree = ~uint64_t{0};   // the pair of no merge
constexpr size_t kSlots = size_t{1} << 14;
constexpr size_t kKeptTokens = size_t{1} << 20;  // of a scratch; a longer word's room is let go
constexpr size_t kShort = 48;  // tokens up to which looking at all is faster than a heap

uint64_t pair_of(int32_t left, int32_t right) {
  return uint64_t(uint32_t(left)) << 32 | uint32_t(right);
}
size_t place_of(uint64_t pair, size_t places) {
  return size_t((pair * 0x9e3779b97f4a7c15) >> 20) & (places - 1);
}

// A word met lately, in one line of the processor's cache. Longer ones are not kept.
struct alignas(64) Slot {
  uint8_t size = 0, count = 0;
  char word[30] = {};
  int32_t tokens[8] = {};
};

}  // namespace

struct Bpe::Scratch {
  std::vector<Slot> slots = std::vector<Slot>(kSlots);
  std::vector<int32_t> tokens = {};
  std::vector<Merge> merges = {};  // of each token with the next
  std::vector<uint32_t> next = {}, previous = {};
  std::vector<uint64_t> heap = {};  // rank and place
};

Bpe::Bpe(BpeOptions options, const std::string& where) : options_(std::move(options)) {
  const auto token_of = [&](const std::string& piece) {
    const auto found = options_.vocab.find(piece);
    return found == options_.vocab.end() ? -1 : found->second;
  };
  for (int i = 0; i < 256; ++i) {
    const char* digits = "0123456789ABCDEF";
    single_[size_t(i)] = token_of(std::string(1, char(i)));
    fallback_[size_t(i)] = token_of(cat("<0x", digits[i / 16], digits[i % 16], ">"));
  }
  merges_.assign(std::bit_ceil(2 * options_.merges.size() + 2), {kFree, kNever, -1});
  uint32_t rank = 0;
  for (const auto& [left, right] : options_.merges) {
    const Merge merge{pair_of(token_of(left), token_of(right)), rank++, token_of(left + right)};
    if (token_of(left) < 0 || token_of(right) < 0 || merge.result < 0)
      fail(Kind::Io, "'", where, "': the merge of '", left, "' and '", right, "' (number ", rank,
           ") wants a token that the vocabulary has not; its vocabulary and merges do not belong "
           "together");
    size_t place = place_of(merge.pair, merges_.size());
    while (merges_[place].pair != kFree && merges_[place].pair != merge.pair)
      place = (place + 1) & (merges_.size() - 1);
    merges_[place] = merge;
  }
}

std::shared_ptr<Bpe::Scratch> Bpe::take() const {
  {
    const MutexLock lock(mutex_);
    if (!idle_.empty()) {
      auto scratch = std::move(idle_.back());
      idle_.pop_back();
      return scratch;
    }
  }
  return std::make_shared<Scratch>();
}

void Bpe::give_back(std::shared_ptr<Scratch> scratch) const {
  if (scratch->tokens.capacity() > kKeptTokens) return;
  const MutexLock lock(mutex_);
  idle_.push_back(std::move(scratch));
}

const Bpe::Merge& Bpe::find(int32_t left, int32_t right) const {
  const uint64_t pair = pair_of(left, right);
  size_t place = place_of(pair, merges_.size());
  while (merges_[place].pair != pair && merges_[place].pair != kFree)
    place = (place + 1) & (merges_.size() - 1);
  return merges_[place];
}

void Bpe::encode(std::string_view word, Scratch& scratch, std::vector<int64_t>& to) const {
  Slot* slot = nullptr;
  if (word.size() <= sizeof slot->word) {
    slot = &scratch.slots[std::hash<std::string_view>{}(word) % kSlots];
    if (slot->size == word.size() && std::memcmp(slot->word, word.data(), word.size()) == 0) {
      to.insert(to.end(), slot->tokens, slot->tokens + slot->count);
      return;
    }
  }
  auto& tokens = scratch.tokens;
  tokens.clear();
  const auto whole =
      options_.ignore_merges ? options_.vocab.find(std::string(word)) : options_.vocab.end();
  if (whole != options_.vocab.end()) {
    tokens.push_back(whole->second);
  } else {
    begin(word, tokens);
    tokens.size() <= kShort ? merge_short(scratch) : merge_long(scratch);
  }
  to.insert(to.end(), tokens.begin(), tokens.end());
  if (slot == nullptr || tokens.size() > std::size(slot->tokens)) return;
  slot->size = uint8_t(word.size());
  slot->count = uint8_t(tokens.size());
  std::ranges::copy(word, slot->word);
  std::ranges::copy(tokens, slot->tokens);
}

void Bpe::begin(std::string_view word, std::vector<int32_t>& tokens) const {
  int unknowns = 0;  // that wait for the next known character
  const auto add_unknowns = [&] {
    if (options_.unknown) tokens.insert(tokens.end(), size_t(unknowns), *options_.unknown);
    unknowns = 0;
  };
  for (size_t i = 0, count = 1; i < word.size(); i += count) {
    count = options_.byte_level ? 1 : size_t(character_bytes(word.substr(i)));
    const std::string_view bytes = word.substr(i, count);
    int32_t token = -1;
    if (count == 1)
      token = single_[uint8_t(bytes[0])];
    else if (const auto found = options_.vocab.find(std::string(bytes));
             found != options_.vocab.end())
      token = found->second;
    if (token >= 0) {
      add_unknowns();
      tokens.push_back(token);
    } else if (options_.byte_fallback &&
               std::ranges::all_of(bytes, [&](char c) { return fallback_[uint8_t(c)] >= 0; })) {
      for (const char c : bytes) tokens.push_back(fallback_[uint8_t(c)]);
    } else {
      unknowns = options_.fuse_unknown ? 1 : unknowns + 1;
    }
  }
  add_unknowns();
}

void Bpe::merge_short(Scratch& scratch) const {
  auto& tokens = scratch.tokens;
  auto& merges = scratch.merges;
  merges.clear();
  for (size_t i = 0; i + 1 < tokens.size(); ++i) merges.push_back(find(tokens[i], tokens[i + 1]));
  while (!merges.empty()) {
    const auto best = std::ranges::min_element(merges, {}, &Merge::rank);
    if (best->rank == kNever) return;
    const auto i = size_t(best - merges.begin());
    tokens[i] = best->result;
    tokens.erase(tokens.begin() + int64_t(i) + 1);
    merges.erase(best);
    if (i < merges.size()) merges[i] = find(tokens[i], tokens[i + 1]);
    if (i > 0) merges[i - 1] = find(tokens[i - 1], tokens[i]);
  }
}

void Bpe::merge_long(Scratch& scratch) const {
  auto& tokens = scratch.tokens;
  auto& merges = scratch.merges;
  auto &next = scratch.next, &previous = scratch.previous;
  auto& heap = scratch.heap;
  const auto size = uint32_t(tokens.size());
  merges.assign(size, {kFree, kNever, -1});
  next.resize(size);
  previous.resize(size);
  heap.clear();
  const auto look = [&](uint32_t i) {
    merges[i] = next[i] == size ? Merge{kFree, kNever, -1} : find(tokens[i], tokens[next[i]]);
    if (merges[i].rank != kNever) heap.push_back(uint64_t(merges[i].rank) << 32 | i);
    return merges[i].rank != kNever;
  };
  for (uint32_t i = 0; i < size; ++i) {
    next[i] = i + 1;
    previous[i] = i - 1;
    look(i);
  }
  std::ranges::make_heap(heap, std::greater{});
  while (!heap.empty()) {
    const uint64_t top = heap.front();
    std::ranges::pop_heap(heap, std::greater{});
    heap.pop_back();
    const auto i = uint32_t(top);
    if (merges[i].rank != top >> 32) continue;  // a neighbour has changed since
    const uint32_t gone = next[i];
    tokens[i] = merges[i].result;
    merges[gone].rank = kNever;
    tokens[gone] = -1;
    next[i] = next[gone];
    if (next[i] != size) previous[next[i]] = i;
    if (look(i)) std::ranges::push_heap(heap, std::greater{});
    if (i != 0 && look(previous[i])) std::ranges::push_heap(heap, std::greater{});
  }
  std::erase(tokens, -1);
}

std::optional<std::string> from_byte_alphabet(std::string_view text) {
  static constexpr auto kBytes = [] {  // by character; -1: none
    std::array<int, 0x144> bytes{};
    bytes.fill(-1);
    int others = 0x100;
    for (int byte = 0; byte < 256; ++byte) {
      const bool is_printable = (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte != 0xad);
      bytes[size_t(is_printable ? byte : others++)] = byte;
    }
    return bytes;
  }();
  std::string bytes;
  for (size_t i = 0; i < text.size(); ++i) {
    auto c = size_t(uint8_t(text[i]));
    if (c >= 0x80) {  // two bytes, or too high
      if ((c & 0xe0) != 0xc0 || i + 1 == text.size()) return {};
      c = (c & 0x1f) << 6 | (uint8_t(text[++i]) & 0x3f);
    }
    if (c >= kBytes.size() || kBytes[c] < 0) return {};
    bytes += char(kBytes[c]);
  }
  return bytes;
}

}  // namespace yoke::data
