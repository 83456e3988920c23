// tokenizer.json -> TokenizerSpec: the format, its limits, and what is refused by name.
#include <algorithm>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "attest/base/error.h"
#include "kernels/tokenizer/added_tokens.h"
#include "kernels/tokenizer/spec.h"
#include "kernels/tokenizer/tokenizer.h"
#include "kernels/tokenizer/utf8.h"

namespace bitwitness::tok {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kDepthMax = 32;
constexpr std::size_t kNodesMax = std::size_t{12} << 20;  // the largest in use have 2 million
constexpr std::size_t kStepsMax = 64;
constexpr std::size_t kAddedTokensMax = 1 << 18;

// Builds the document, within limits on depth and on the number of values; refuses duplicate keys.
class BoundedDocument : public nlohmann::json_sax<Json> {
 public:
  explicit BoundedDocument(const std::string& origin) : origin_(origin) {}

  Json take() { return std::move(root_); }

  bool null() override { return put(nullptr), true; }
  bool boolean(bool value) override { return put(value), true; }
  bool number_integer(number_integer_t value) override { return put(value), true; }
  bool number_unsigned(number_unsigned_t value) override { return put(value), true; }
  bool number_float(number_float_t value, const string_t&) override { return put(value), true; }
  bool string(string_t& value) override { return put(std::move(value)), true; }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(Json::object()); }
  bool start_array(std::size_t) override { return open(Json::array()); }
  bool end_object() override { return open_.pop_back(), true; }
  bool end_array() override { return open_.pop_back(), true; }
  bool key(string_t& name) override {
    const auto [slot, inserted] =
        open_.back()->get_ref<Json::object_t&>().emplace(std::move(name), nullptr);
    if (!inserted)
      throw usage_error(origin_ + ": the key " + quote_name(slot->first) + " occurs twice");
    slot_ = &slot->second;
    return true;
  }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    const std::string_view text = error.what();
    const std::size_t detail = text.rfind("; ");
    throw usage_error(origin_ + ": not valid JSON at byte " + std::to_string(position) + ": " +
                      printable(detail == std::string_view::npos ? text : text.substr(detail + 2)));
  }

 private:
  static std::string printable(std::string_view text) {
    const std::string q = quote_name(text);
    return q.substr(1, q.size() - 2);
  }

  Json* put(Json value) {
    if (++nodes_ > kNodesMax) {
      throw usage_error(origin_ + ": more than " + std::to_string(kNodesMax) + " JSON values");
    }
    Json* place = &root_;
    if (!open_.empty()) {
      if (open_.back()->is_array()) {
        auto& array = open_.back()->get_ref<Json::array_t&>();
        place = &array.emplace_back();
      } else {
        place = slot_;
      }
    }
    *place = std::move(value);
    return place;
  }
  bool open(Json container) {
    if (open_.size() >= kDepthMax) {
      throw usage_error(origin_ + ": JSON nested deeper than " + std::to_string(kDepthMax));
    }
    open_.push_back(put(std::move(container)));
    return true;
  }

  const std::string& origin_;
  Json root_;
  std::vector<Json*> open_;  // containers around the current value; a parent never moves meanwhile
  Json* slot_ = nullptr;     // where the value of the last key goes
  std::size_t nodes_ = 0;
};

// A JSON value with the path that leads to it, for error messages.
class Node {
 public:
  Node(const Json& json, std::string path) : json_(&json), path_(std::move(path)) {}

  const std::string& path() const { return path_; }
  bool is_null() const { return json_->is_null(); }
  bool is_string() const { return json_->is_string(); }
  bool is_array() const { return json_->is_array(); }

  [[noreturn]] void refuse(const std::string& what) const {
    throw usage_error(path_ + ": " + what);
  }

  const Json::object_t& object() const {
    if (!json_->is_object()) refuse(std::string("an object is needed, not ") + json_->type_name());
    return json_->get_ref<const Json::object_t&>();
  }
  std::vector<Node> array(std::size_t max) const {
    if (!json_->is_array()) refuse(std::string("an array is needed, not ") + json_->type_name());
    if (json_->size() > max) refuse("more than " + std::to_string(max) + " entries");
    std::vector<Node> nodes;
    nodes.reserve(json_->size());
    for (std::size_t i = 0; i < json_->size(); ++i) {
      nodes.emplace_back((*json_)[i], path_ + "[" + std::to_string(i) + "]");
    }
    return nodes;
  }
  const Json::array_t& raw_array() const {
    if (!json_->is_array()) refuse(std::string("an array is needed, not ") + json_->type_name());
    return json_->get_ref<const Json::array_t&>();
  }
  const std::string& text() const {
    if (!json_->is_string()) refuse(std::string("a string is needed, not ") + json_->type_name());
    return json_->get_ref<const std::string&>();
  }
  bool boolean() const {
    if (!json_->is_boolean()) refuse(std::string("a boolean is needed, not ") + json_->type_name());
    return json_->get<bool>();
  }
  std::uint32_t id() const {
    if (!json_->is_number_unsigned()) {
      refuse("a token id (an integer from 0 to " + std::to_string(kTokenIdMax) + ") is needed");
    }
    const auto value = json_->get<std::uint64_t>();
    if (value > kTokenIdMax) refuse("token id " + std::to_string(value) + " is out of range");
    return static_cast<std::uint32_t>(value);
  }

  // The member `name`, or nullopt if it is missing or null.
  std::optional<Node> find(const std::string& name) const {
    const auto& members = object();
    const auto found = members.find(name);
    if (found == members.end() || found->second.is_null()) return std::nullopt;
    return Node(found->second, path_ + "." + name);
  }
  Node get(const std::string& name) const {
    auto node = find(name);
    if (!node) refuse("the member " + quote_name(name) + " is missing");
    return *std::move(node);
  }
  bool flag(const std::string& name, std::optional<bool> otherwise) const {
    const auto node = find(name);
    if (!node && !otherwise) refuse("the member " + quote_name(name) + " is missing");
    return node ? node->boolean() : *otherwise;
  }
  void only(std::initializer_list<std::string_view> known) const {
    for (const auto& [name, value] : object()) {
      if (std::find(known.begin(), known.end(), name) == known.end()) {
        refuse("the member " + quote_name(name) + " is not supported");
      }
    }
  }

 private:
  const Json* json_;
  std::string path_;
};

PatternSpec parse_pattern(const Node& node) {
  node.only({"String", "Regex"});
  const auto literal = node.find("String");
  const auto regex = node.find("Regex");
  if (literal.has_value() == regex.has_value()) node.refuse("either String or Regex is needed");
  const Node& text = regex ? *regex : *literal;
  if (text.text().empty()) text.refuse("an empty pattern is not supported");
  return {regex.has_value(), text.text()};
}

void parse_normalizer(const Node& node, std::vector<NormalizerStep>& steps) {
  using Kind = NormalizerStep::Kind;
  if (steps.size() >= kStepsMax) node.refuse("too many steps");
  const std::string type = node.get("type").text();
  NormalizerStep step;
  if (type == "Sequence") {
    node.only({"type", "normalizers"});
    for (const Node& inner : node.get("normalizers").array(kStepsMax)) {
      parse_normalizer(inner, steps);
    }
    return;
  }
  if (type == "Prepend") {
    node.only({"type", "prepend"});
    step.kind = Kind::kPrepend;
    step.text = node.get("prepend").text();
  } else if (type == "Replace") {
    node.only({"type", "pattern", "content"});
    step.kind = Kind::kReplace;
    step.pattern = parse_pattern(node.get("pattern"));
    step.text = node.get("content").text();
  } else {
    node.only({"type"});
    if (type == "NFC") {
      step.kind = Kind::kNfc;
    } else if (type == "NFD") {
      step.kind = Kind::kNfd;
    } else if (type == "NFKC") {
      step.kind = Kind::kNfkc;
    } else if (type == "NFKD") {
      step.kind = Kind::kNfkd;
    } else {
      node.refuse("the normalizer " + quote_name(type) + " is not supported");
    }
  }
  steps.push_back(std::move(step));
}

SplitBehavior parse_behavior(const Node& node) {
  const std::string& name = node.text();
  if (name == "Removed") return SplitBehavior::kRemoved;
  if (name == "Isolated") return SplitBehavior::kIsolated;
  if (name == "MergedWithPrevious") return SplitBehavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return SplitBehavior::kMergedWithNext;
  if (name == "Contiguous") return SplitBehavior::kContiguous;
  node.refuse("the behavior " + quote_name(name) + " is not supported");
}

void parse_pre_tokenizer(const Node& node, std::vector<PreTokenizerStep>& steps) {
  if (steps.size() >= kStepsMax) node.refuse("too many steps");
  const std::string type = node.get("type").text();
  if (type == "Sequence") {
    node.only({"type", "pretokenizers"});
    for (const Node& inner : node.get("pretokenizers").array(kStepsMax)) {
      parse_pre_tokenizer(inner, steps);
    }
    return;
  }
  if (!steps.empty() && steps.back().kind == PreTokenizerStep::Kind::kByteLevel) {
    node.refuse("a step after ByteLevel is not supported");
  }
  PreTokenizerStep step;
  if (type == "Split") {
    node.only({"type", "pattern", "behavior", "invert"});
    step.pattern = parse_pattern(node.get("pattern"));
    step.behavior = parse_behavior(node.get("behavior"));
    step.invert = node.flag("invert", std::nullopt);
  } else if (type == "Digits") {
    node.only({"type", "individual_digits"});
    step.pattern = {true, "\\p{N}"};
    step.behavior = node.flag("individual_digits", std::nullopt) ? SplitBehavior::kIsolated
                                                                 : SplitBehavior::kContiguous;
  } else if (type == "ByteLevel") {
    node.only({"type", "add_prefix_space", "trim_offsets", "use_regex"});
    step.kind = PreTokenizerStep::Kind::kByteLevel;
    step.add_prefix_space = node.flag("add_prefix_space", std::nullopt);
    step.use_regex = node.flag("use_regex", true);
  } else {
    node.refuse("the pre-tokenizer " + quote_name(type) + " is not supported");
  }
  steps.push_back(std::move(step));
}

void parse_post_processor(const Node& node, std::vector<Template>& templates) {
  if (templates.size() >= kStepsMax) node.refuse("too many steps");
  const std::string type = node.get("type").text();
  if (type == "Sequence") {
    node.only({"type", "processors"});
    for (const Node& inner : node.get("processors").array(kStepsMax)) {
      parse_post_processor(inner, templates);
    }
  } else if (type == "ByteLevel") {  // changes offsets only
    node.only({"type", "add_prefix_space", "trim_offsets", "use_regex"});
  } else if (type == "TemplateProcessing") {
    if (!templates.empty()) node.refuse("a second TemplateProcessing is not supported");
    node.only({"type", "single", "pair", "special_tokens"});
    const Node specials = node.get("special_tokens");
    Template items;
    for (const Node& piece : node.get("single").array(kStepsMax)) {
      piece.only({"SpecialToken", "Sequence"});
      const auto special = piece.find("SpecialToken");
      const auto sequence = piece.find("Sequence");
      if (special.has_value() == sequence.has_value()) {
        piece.refuse("either SpecialToken or Sequence is needed");
      }
      TemplateItem item;
      if (sequence) {
        sequence->only({"id", "type_id"});
        if (sequence->get("id").text() != "A") sequence->refuse("only the sequence A is supported");
        item.is_text = true;
      } else {
        special->only({"id", "type_id"});
        const Node token = specials.get(special->get("id").text());
        token.only({"id", "ids", "tokens"});
        for (const Node& id : token.get("ids").array(kStepsMax)) item.ids.push_back(id.id());
      }
      items.push_back(std::move(item));
    }
    if (std::count_if(items.begin(), items.end(), [](const auto& i) { return i.is_text; }) != 1) {
      node.get("single").refuse("the sequence A must occur once");
    }
    templates.push_back(std::move(items));
  } else {
    node.refuse("the post-processor " + quote_name(type) + " is not supported");
  }
}

// Only ByteLevel works; Fuse after it joins what is already one string.
void parse_decoder(const Node& node, bool& byte_level) {
  const std::string type = node.get("type").text();
  if (type == "Sequence") {
    node.only({"type", "decoders"});
    for (const Node& inner : node.get("decoders").array(kStepsMax)) {
      parse_decoder(inner, byte_level);
    }
  } else if (type == "ByteLevel") {
    node.only({"type", "add_prefix_space", "trim_offsets", "use_regex"});
    if (byte_level) node.refuse("a second ByteLevel decoder is not supported");
    byte_level = true;
  } else if (type == "Fuse") {
    node.only({"type"});
    if (!byte_level) node.refuse("the decoder \"Fuse\" before ByteLevel is not supported");
  } else {
    node.refuse("the decoder " + quote_name(type) + " is not supported");
  }
}

void parse_model(const Node& node, TokenizerSpec& spec) {
  node.only({"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
             "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"});
  if (const auto type = node.find("type"); type && type->text() != "BPE") {
    type->refuse("the model " + quote_name(type->text()) + " is not supported; BPE is");
  }
  const auto& members = node.object();
  if (const auto dropout = members.find("dropout");
      dropout != members.end() && !dropout->second.is_null() && dropout->second != 0) {
    node.refuse("dropout is not supported: it makes the ids random");
  }
  for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (const auto text = node.find(name); text && !text->text().empty()) {
      text->refuse(quote_name(text->text()) + " is not supported");
    }
  }
  if (const auto unk = node.find("unk_token")) spec.unk_token = unk->text();
  node.flag("fuse_unk", false);  // without effect where every byte has a token
  spec.byte_fallback = node.flag("byte_fallback", false);
  spec.ignore_merges = node.flag("ignore_merges", false);

  const Node vocab = node.get("vocab");
  const auto& entries = vocab.object();
  std::unordered_map<std::uint32_t, const std::string*> token_of;
  token_of.reserve(entries.size());
  spec.vocab.reserve(entries.size());
  for (const auto& [token, value] : entries) {
    const std::uint32_t id = Node(value, vocab.path() + "[" + quote_name(token) + "]").id();
    const auto [slot, inserted] = token_of.emplace(id, &token);
    if (!inserted) {
      vocab.refuse("the tokens " + quote_name(*slot->second) + " and " + quote_name(token) +
                   " have the same id " + std::to_string(id));
    }
    spec.vocab.emplace_back(token, id);
  }
  if (spec.vocab.empty()) vocab.refuse("no tokens");

  const Node merges = node.get("merges");
  const auto& list = merges.raw_array();
  spec.merges.reserve(list.size());
  for (std::size_t rank = 0; rank < list.size(); ++rank) {
    const Json& merge = list[rank];
    const auto refuse = [&] {
      merges.refuse("entry " + std::to_string(rank) + " is neither \"a b\" nor [\"a\", \"b\"]");
    };
    if (merge.is_string()) {
      const auto& text = merge.get_ref<const std::string&>();
      const std::size_t space = text.find(' ');
      if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) refuse();
      spec.merges.emplace_back(text.substr(0, space), text.substr(space + 1));
    } else {
      if (!merge.is_array() || merge.size() != 2 || !merge[0].is_string() ||
          !merge[1].is_string()) {
        refuse();
      }
      spec.merges.emplace_back(merge[0].get<std::string>(), merge[1].get<std::string>());
    }
    if (merge.is_string() != list.front().is_string()) refuse();
  }
}

// Added tokens, with the ids that the stock library gives them. It ignores the ids in the file: a
// token of the vocabulary keeps its id, the others are numbered on. A file that disagrees is
// refused.
void parse_added_tokens(const Node& node, TokenizerSpec& spec) {
  std::unordered_map<std::string_view, std::uint32_t> vocab;
  vocab.reserve(spec.vocab.size());
  for (const auto& [token, id] : spec.vocab) vocab.emplace(token, id);
  std::unordered_set<std::string> seen;
  std::unordered_set<std::uint32_t> ids;
  for (const auto& [token, id] : spec.vocab) ids.insert(id);
  std::optional<std::uint32_t> last;  // highest id given so far
  for (const Node& entry : node.array(kAddedTokensMax)) {
    entry.only({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
    AddedToken token;
    token.id = entry.get("id").id();
    token.content = entry.get("content").text();
    token.single_word = entry.flag("single_word", std::nullopt);
    token.lstrip = entry.flag("lstrip", std::nullopt);
    token.rstrip = entry.flag("rstrip", std::nullopt);
    token.normalized = entry.flag("normalized", std::nullopt);
    token.special = entry.flag("special", std::nullopt);
    if (token.content.empty()) entry.refuse("an empty token is not supported");
    if (token.content.size() > kAddedTokenBytesMax) {
      entry.refuse("a token longer than " + std::to_string(kAddedTokenBytesMax) + " bytes");
    }
    if (!seen.insert(token.content).second) {
      entry.refuse("the token " + quote_name(token.content) + " occurs twice");
    }
    const auto size = static_cast<std::uint32_t>(spec.vocab.size());
    const auto known = vocab.find(token.content);
    std::uint32_t expected = 0;
    if (known != vocab.end()) {
      expected = known->second;
    } else {
      expected = last && *last >= size ? *last + 1 : size;
      if (!ids.insert(expected).second) {
        entry.refuse("the id " + std::to_string(expected) + " already belongs to another token");
      }
    }
    if (token.id != expected) {
      entry.refuse("the token " + quote_name(token.content) + " says id " +
                   std::to_string(token.id) + ", but the stock library gives it " +
                   std::to_string(expected));
    }
    last = std::max(last.value_or(0), expected);
    spec.added_tokens.push_back(std::move(token));
  }
}

}  // namespace

TokenizerSpec parse_tokenizer_json(std::span<const std::byte> json, const std::string& origin) {
  if (json.size() > kTokenizerFileBytesMax) {
    throw usage_error(origin + ": " + std::to_string(json.size()) +
                      " bytes; a tokenizer.json has at most " +
                      std::to_string(kTokenizerFileBytesMax));
  }
  BoundedDocument document(origin);
  const auto* begin = reinterpret_cast<const char*>(json.data());
  if (!Json::sax_parse(begin, begin + json.size(), &document)) {
    throw usage_error(origin + ": not valid JSON");
  }
  const Json parsed = document.take();
  const Node root(parsed, origin);
  root.only({"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
             "post_processor", "decoder", "model"});
  if (const auto version = root.find("version"); version && version->text() != "1.0") {
    version->refuse("version " + quote_name(version->text()) + " is not supported; 1.0 is");
  }
  for (const char* name : {"truncation", "padding"}) {
    if (const auto option = root.find(name)) {
      option->refuse("is not supported: it changes the ids; set it to null");
    }
  }

  TokenizerSpec spec;
  parse_model(root.get("model"), spec);
  if (const auto tokens = root.find("added_tokens")) parse_added_tokens(*tokens, spec);
  if (const auto normalizer = root.find("normalizer"))
    parse_normalizer(*normalizer, spec.normalizer);
  if (const auto pre = root.find("pre_tokenizer")) parse_pre_tokenizer(*pre, spec.pre_tokenizer);
  if (spec.pre_tokenizer.empty() ||
      spec.pre_tokenizer.back().kind != PreTokenizerStep::Kind::kByteLevel) {
    root.refuse("pre_tokenizer without ByteLevel is not supported");
  }
  if (const auto post = root.find("post_processor")) parse_post_processor(*post, spec.templates);
  bool byte_level = false;
  if (const auto decoder = root.find("decoder")) parse_decoder(*decoder, byte_level);
  if (!byte_level) root.refuse("decoder without ByteLevel is not supported");
  return spec;
}

}  // namespace bitwitness::tok
