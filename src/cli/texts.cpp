// Completions for shells, the man page and the file of bin/isograd, made from the verbs and options of the
// help and the configuration's keys.
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <map>

#include "base/files.hpp"
#include "base/print.hpp"
#include "cli/texts.hpp"
#include "cli/verbs.hpp"
#include "train/config_table.hpp"

namespace isograd {
namespace {

using Words = std::vector<std::string>;

std::map<const CLI::Option*, Words>& offered() {
  static std::map<const CLI::Option*, Words> words;
  return words;
}

std::string replaced(std::string text, const std::string& old, const std::string& with) {
  for (std::size_t at = 0; (at = text.find(old, at)) != std::string::npos; at += with.size())
    text.replace(at, old.size(), with);
  return text;
}

std::string in_quotes(const std::string& text) { return "'" + replaced(text, "'", "'\\''") + "'"; }
std::string in_fish_quotes(const std::string& text) {
  return "'" + replaced(replaced(text, "\\", "\\\\"), "'", "\\'") + "'";
}

// The words that complete a value. <files>, <folders> and <keys:PREFIX>, the configuration's, stand for
// theirs.
Words values_of(const CLI::Option& option) {
  if (const auto found = offered().find(&option); found != offered().end()) return found->second;
  const std::string type = option.get_positional() ? option.get_name() : type_of(option);
  if (const auto at = type.find("KEY=VALUE"); at != std::string::npos)
    return {fmt::format("<keys:{}>", type.substr(0, at))};
  for (const char* folder : {"DIR", "DIRECTORY", "RUN", "CHECKPOINT", "A", "B"})
    if (type == folder) return {"<folders>"};
  const bool other = type == "URL" || type == "TENANT";
  return type.starts_with("FILE") || type.ends_with(".csv") || (option.get_positional() && !other)
             ? Words{"<files>"}
             : Words{};
}

Words values_of(const ConfigKey& key) {
  const ConfigValue value = key.get(RunConfig{});
  Words words = key.allowed.choices;
  for (const auto& [other, ours] : key.allowed.aliases) words.push_back(other);
  if (std::holds_alternative<bool>(value)) return {"true", "false"};
  const bool text =
      std::holds_alternative<std::string>(value) || std::holds_alternative<std::vector<std::string>>(value);
  return words.empty() && text ? Words{"<files>"} : words;
}

struct Place {
  std::string name;  // "isograd data pack"
  const CLI::App* app;
  std::vector<const CLI::Option*> options, positionals;
  std::vector<const CLI::App*> verbs;

  Words values() const {                                                // of the positionals
    Words all = name == "isograd launch" ? Words{"<files>"} : Words{};  // the program to start
    for (const CLI::Option* one : positionals)
      for (const std::string& word : values_of(*one))
        if (std::ranges::find(all, word) == all.end()) all.push_back(word);
    return all;
  }
};

// The program, its verbs and theirs, without hidden ones.
std::vector<Place> places_of(const CLI::App& app, const std::string& name = "isograd") {
  Place own{name, &app, {}, {}, {}};
  for (const CLI::Option* option : app.get_options())
    (option->get_positional() ? own.positionals : own.options).push_back(option);
  std::vector<Place> below;
  for (const CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (verb->get_group().empty()) continue;
    own.verbs.push_back(verb);
    for (Place& place : places_of(*verb, name + " " + verb->get_name())) below.push_back(std::move(place));
  }
  below.insert(below.begin(), std::move(own));
  return below;
}

constexpr const char* kBash = R"(
_isograd_offer() {  # what stands before the word, the word, what could complete it
  local before=$1 given=$2 each key prefix; shift 2
  for each; do
    case $each in
      '<files>'|'<folders>')
        compopt -o filenames 2>/dev/null
        while IFS= read -r key; do COMPREPLY+=("$before$key"); done \
          < <(if [[ $each == '<files>' ]]; then compgen -f -- "$given"; else compgen -d -- "$given"; fi) ;;
      '<keys:'*)
        prefix=${each#<keys:} prefix=${prefix%>}
        if [[ $given == "$prefix"*=* ]]; then
          key=${given%%=*}
          _isograd_offer "$before$key=" "${given#*=}" ${_isograd_keys["$key"]-}
        else
          for key in "${!_isograd_keys[@]}"; do
            if [[ $key == "$prefix"* && $key= == "$given"* ]]; then COMPREPLY+=("$before$key="); fi
          done
        fi ;;
      *) if [[ $each == "$given"* ]]; then COMPREPLY+=("$before$each"); fi ;;
    esac
  done
}

_isograd() {
  local IFS=$' \t\n' at=isograd word words=() i
  COMPREPLY=()
  for ((i = 0; i <= COMP_CWORD; i++)); do  # bash cuts words at = and :, too
    word=${COMP_WORDS[i]}
    if ((i > 1)) && [[ -n $word && ($word == [=:]* || ${words[-1]} == *[=:]) ]]; then words[-1]+=$word
    else words+=("$word"); fi
  done
  local current=${words[-1]} option=${words[-2]} before= given breaks=${COMP_WORDBREAKS//[^=:]/}
  for word in "${words[@]:1:${#words[@]}-2}"; do
    if [[ -n ${_isograd_options["$at $word"]-} ]]; then at+=" $word"; fi
  done
  given=$current
  if [[ $current == --*=* ]]; then option=${current%%=*} before=${current%%=*}= given=${current#*=}; fi
  if [[ $option == -* && -n ${_isograd_values["$at $option"]+yes} ]]; then
    _isograd_offer "$before" "$given" ${_isograd_values["$at $option"]}
  elif [[ $current == -* ]]; then
    _isograd_offer "" "$current" ${_isograd_options["$at"]}
  else
    _isograd_offer "" "$current" ${_isograd_verbs["$at"]-} ${_isograd_values["$at"]-}
  fi
  if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]]; then compopt -o nospace 2>/dev/null; fi
  if [[ -n $breaks && $current == *["$breaks"]* ]]; then
    COMPREPLY=("${COMPREPLY[@]#"${current%"${current##*["$breaks"]}"}"}")
  fi
}
complete -F _isograd isograd
)";

std::string for_bash(const std::vector<Place>& places) {
  std::string options, values, verbs, keys;
  const auto row = [](const std::string& key, const Words& words) {
    return fmt::format("  [{}]={}\n", in_quotes(key), in_quotes(fmt::format("{}", fmt::join(words, " "))));
  };
  for (const Place& place : places) {
    Words flags, names;
    for (const CLI::Option* option : place.options)
      for (const std::string& flag : flags_of(*option)) {
        flags.push_back(flag);
        if (takes_value(*option)) values += row(place.name + " " + flag, values_of(*option));
      }
    options += row(place.name, flags);
    if (const Words own = place.values(); !own.empty()) values += row(place.name, own);
    for (const CLI::App* verb : place.verbs) names.push_back(verb->get_name());
    if (!names.empty()) verbs += row(place.name, names);
  }
  for (const ConfigKey& key : config_keys()) keys += row(key.name, values_of(key));
  return fmt::format(
      "# Completions of isograd for bash, as `isograd completions bash` prints them.\n"
      "declare -gA _isograd_verbs=(\n{}) _isograd_options=(\n{}) _isograd_values=(\n{}) _isograd_keys=(\n{})\n{}",
      verbs, options, values, keys, kBash);
}

constexpr const char* kZsh = R"(
_isograd_offer() {
  local each key prefix; local -i found=1
  for each; do
    case $each in
      ('<files>') _files && found=0 ;;
      ('<folders>') _path_files -/ && found=0 ;;
      ('<keys:'*)
        prefix=${${each#<keys:}%>}
        if [[ $PREFIX == $prefix*=* ]]; then
          key=${PREFIX%%=*}
          compset -P '*=' && _isograd_offer ${=_isograd_keys[$key]} && found=0
        else
          for key in ${(k)_isograd_keys}; do [[ $key == $prefix* ]] && compadd -S '' -- $key= && found=0; done
        fi ;;
      (*=) compadd -S '' -- $each && found=0 ;;
      (*) compadd -- $each && found=0 ;;
    esac
  done
  return found
}
)";

std::string for_zsh(const std::vector<Place>& places) {
  std::string cases, keys, names;
  const auto offer = [](const Words& words) {
    std::string text = " _isograd_offer";
    for (const std::string& word : words) text += " \"" + replaced(word, ":", "\\:") + "\"";
    return words.empty() ? std::string(" ") : text;
  };
  for (const Place& place : places) {
    if (place.name != "isograd") names += (names.empty() ? "" : "|") + in_quotes(place.name);
    std::string specs, verbs;
    for (const CLI::Option* option : place.options)
      for (const std::string& flag : flags_of(*option)) {
        const std::string about = replaced(on_one_line(option->get_description()), "]", "\\]");
        std::string spec = (is_repeatable(*option) ? "*" : "") + flag;
        if (takes_value(*option))
          spec += fmt::format("{}[{}]:{}:{}", flag.starts_with("--") ? "=" : "+", about, type_of(*option),
                              offer(values_of(*option)));
        else
          spec += fmt::format("[{}]", about);
        specs += " \\\n      " + in_quotes(spec);
      }
    for (const CLI::App* verb : place.verbs)
      verbs += " " + in_quotes(verb->get_name() + ":" + on_one_line(verb->get_description()));
    if (!verbs.empty()) specs += " \\\n      '*:verb: _describe verb verbs'";
    // The verb's name is a word too, without which _arguments would complete no options behind it.
    if (verbs.empty()) specs += " \\\n      " + in_quotes("*:value:" + offer(place.values()));
    cases += fmt::format("    ({})\n      verbs=({})\n      _arguments :{} ;;\n", in_quotes(place.name),
                         verbs, specs);
  }
  for (const ConfigKey& key : config_keys())
    keys += fmt::format("  {} {}\n", key.name, in_quotes(fmt::format("{}", fmt::join(values_of(key), " "))));
  return fmt::format(
      "#compdef isograd\n# Completions of isograd for zsh, as `isograd completions zsh` prints them.\n"
      "typeset -gA _isograd_keys=(\n{})\n{}\n_isograd() {{\n  local at=isograd word; local -a verbs\n"
      "  for word in ${{words[2,CURRENT-1]}}; do\n"
      "    case \"$at $word\" in ({}) at+=\" $word\" ;; esac\n  done\n  case $at in\n{}  esac\n}}\n"
      "if [[ $funcstack[1] == _isograd ]]; then _isograd \"$@\"; else compdef _isograd isograd; fi\n",
      keys, kZsh, names, cases);
}

constexpr const char* kFish = R"(
function __isograd_at
    set -l at isograd
    for word in (commandline -opc)[2..]
        contains -- "$at $word" $__isograd_names; and set at "$at $word"
    end
    test "$at" = "$argv[1]"
end
function __isograd_complete_keys
    set -l token (commandline -ct)
    for row in $__isograd_keys
        set -l words (string split ' ' -- $row)
        string match -q -- "$argv[1]*" $words[1]; or continue
        if string match -q -- "$words[1]=*" $token
            for word in $words[2..]
                if test "$word" = '<files>'
                    for file in (__fish_complete_path (string replace -- "$words[1]=" '' $token)); echo "$words[1]=$file"; end
                else
                    echo "$words[1]=$word"
                end
            end
        else
            echo "$words[1]="
        end
    end
end
complete -c isograd -f
)";

std::string for_fish(const std::vector<Place>& places) {
  std::string names, keys, rows;
  // The part of `complete` that offers these words; "": nothing.
  const auto offer = [](const Words& words, bool of_option) {
    std::string plain, files;
    for (const std::string& word : words)
      if (word == "<files>")
        files = " -F";
      else if (word == "<folders>")
        plain += " (__fish_complete_directories (commandline -ct) '')";
      else if (word.starts_with("<keys:"))
        plain += " (__isograd_complete_keys '" + word.substr(6, word.size() - 7) + "')";
      else
        plain += " " + word;
    return (!of_option      ? ""
            : files.empty() ? " -x"
                            : " -r") +
           files + (plain.empty() ? "" : " -a " + in_fish_quotes(plain.substr(1)));
  };
  for (const Place& place : places) {
    names += " " + in_fish_quotes(place.name);
    const std::string row = fmt::format("complete -c isograd -n {}",
                                        in_fish_quotes(fmt::format("__isograd_at '{}'", place.name)));
    for (const CLI::App* verb : place.verbs)
      rows += fmt::format("{} -a {} -d {}\n", row, verb->get_name(),
                          in_fish_quotes(on_one_line(verb->get_description())));
    for (const CLI::Option* option : place.options) {
      rows += row;
      for (const std::string& name : option->get_snames()) rows += " -s " + name;
      for (const std::string& name : option->get_lnames()) rows += " -l " + name;
      rows += fmt::format("{} -d {}\n", takes_value(*option) ? offer(values_of(*option), true) : "",
                          in_fish_quotes(on_one_line(option->get_description())));
    }
    if (const std::string own = offer(place.values(), false); !own.empty()) rows += row + own + "\n";
  }
  for (const ConfigKey& key : config_keys()) {
    keys += " '" + key.name;
    for (const std::string& word : values_of(key)) keys += " " + word;
    keys += "'";
  }
  return fmt::format(
      "# Completions of isograd for fish, as `isograd completions fish` prints them.\n"
      "set -g __isograd_names{}\nset -g __isograd_keys{}\n{}{}",
      names, keys, kFish, rows);
}

// ---- the man page ----

std::string roff(const std::string& text) {
  std::string safe = replaced(replaced(text, "\\", "\\e"), "-", "\\-");
  return safe.starts_with('.') || safe.starts_with('\'') ? "\\&" + safe : safe;
}

std::string paragraph(const CLI::Option& option) {
  Words names = flags_of(option);
  for (std::string& name : names) name = "\\fB" + roff(name) + "\\fR";
  if (option.get_positional()) names = {"\\fI" + roff(option.get_name()) + "\\fR"};
  std::string text = fmt::format(".TP\n{}", fmt::join(names, ", ")), facts = facts_of(option);
  if (takes_value(option) && !option.get_positional()) text += " \\fI" + roff(type_of(option)) + "\\fR";
  if (!facts.empty()) facts = " (" + facts + ")";
  return text + "\n" + roff(on_one_line(option.get_description()) + facts) + "\n";
}

// Lines with blanks before them are commands, as in help.
std::string remarks(const std::string& footer, std::string gap = ".PP\n") {
  std::string text;
  bool commands = false;
  for (const std::string& line : CLI::detail::split(footer, '\n')) {
    const bool command = line.starts_with("  ");
    if (command != commands) text += command ? ".PP\n.nf\n.RS\n" : ".RE\n.fi\n";
    if (line.empty() || command != commands) gap = command ? "" : ".PP\n";
    commands = command;
    if (line.empty()) continue;
    text += gap + roff(command ? line.substr(2) : line) + "\n", gap.clear();
  }
  return text + (commands ? ".RE\n.fi\n" : "");
}

}  // namespace

CLI::Option* offers(CLI::Option* option, std::vector<std::string> words) {
  offered()[option] = std::move(words);
  return option;
}

std::string man_page(const CLI::App& program) {
  std::string verbs, common;
  for (const Place& place : places_of(program)) {
    std::string own, usage = "\\fB" + roff(place.name) + "\\fR";
    for (const CLI::Option* option : place.positionals) {
      own += paragraph(*option);
      const std::string name =
          "\\fI" + roff(option->get_name()) + (is_repeatable(*option) ? " ...\\fR" : "\\fR");
      usage += option->get_required() ? " " + name : " [" + name + "]";
    }
    for (const CLI::Option* option : place.options)
      if (place.app == &program)
        common += paragraph(*option);
      else if (option->get_group() != "Output" && option != place.app->get_help_ptr())
        own += paragraph(*option);
    if (place.app == &program) continue;
    const std::string footer = place.app->get_footer();  // a verb without its own has the program's
    if (!place.verbs.empty()) usage += " \\fIVERB\\fR";
    verbs += fmt::format(".SS {}\n{}.\n{}{}", usage, roff(on_one_line(place.app->get_description())), own,
                         footer == program.get_footer() ? "" : remarks(footer));
  }
  std::string about = roff(program.get_description());
  about.erase(about.find_last_not_of('.') + 1);
  return fmt::format(
      ".TH ISOGRAD 1 \"\" \"isograd " ISOGRAD_VERSION
      "\" \"User Commands\"\n.ad l\n"
      ".SH NAME\nisograd \\- {}\n.SH SYNOPSIS\n\\fBisograd\\fR \\fIVERB\\fR [\\fIOPTION\\fR ...]\n"
      ".SH VERBS\n{}.SH OPTIONS OF EVERY VERB\n{}.SH NOTES\n{}",
      about, verbs, common, remarks(program.get_footer(), ""));
}

namespace {

std::string completions(const CLI::App& program, const std::string& shell) {
  const std::vector<Place> places = places_of(program);
  return shell == "bash" ? for_bash(places) : shell == "zsh" ? for_zsh(places) : for_fish(places);
}

constexpr std::array kShells = {"bash", "zsh", "fish"};

// The texts that are the same in every environment, for bin/isograd.
std::string texts_of(const CLI::App& program) {
  std::string all;
  const auto add = [&](const Words& words, const std::string& text) { all += text_key(words) + text; };
  for (const Place& place : places_of(program)) {
    const Words verbs = CLI::detail::split(place.name, ' ');
    const std::string text = help_of(*place.app);
    for (const char* flag : {"--help", "-h"}) {
      Words words(verbs.begin() + 1, verbs.end());
      words.emplace_back(flag);
      add(words, text);
    }
    Words words = verbs;
    words.front() = "help";
    add(words, text);
  }
  for (const char* flag : {"--version", "-V"}) add({flag}, program.version() + "\n");
  for (const char* shell : kShells) add({"completions", shell}, completions(program, shell));
  add({"help", "--man"}, man_page(program));
  return all;
}

}  // namespace

Verb texts_verb(CLI::App& program) {
  CLI::App* verb = program.add_subcommand("texts", "")->group("");
  const auto file = std::make_shared<std::string>();
  verb->add_option("FILE", *file)->required();
  return {verb, [&program, file] { return write_file(*file, texts_of(program)), 0; }};
}

Verb completions_verb(CLI::App& program) {
  CLI::App* verb = program.add_subcommand("completions", "Print the completion script of a shell");
  const auto shell = std::make_shared<std::string>();
  is_one_of(verb->add_option("SHELL", *shell, "the shell")->required(), {kShells.begin(), kShells.end()});
  verb->footer(
      "An installed isograd has the scripts in share/, where shells find them. Otherwise load one with:\n\n"
      "  source <(isograd completions bash)\n"
      "  isograd completions fish | source\n\n"
      "Exit status: 0 done; 2 bad input.");
  return {verb, [&program, shell] { return print(stdout, completions(program, *shell)), 0; }};
}

}  // namespace isograd
