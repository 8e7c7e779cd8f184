# The man page and the completions, printed by the command line ${_isograd}, in the folders of ${_share} where man and
# shells look.
foreach(_text "help;--man;man/man1/isograd.1" "completions;bash;bash-completion/completions/isograd"
    "completions;zsh;zsh/site-functions/_isograd" "completions;fish;fish/vendor_completions.d/isograd.fish")
  list(POP_BACK _text _place)
  set(_file "${_share}/${_place}")
  message(STATUS "Installing: ${_file}")
  cmake_path(GET _file PARENT_PATH _folder)
  file(MAKE_DIRECTORY "${_folder}")
  execute_process(COMMAND "${_isograd}" ${_text} OUTPUT_FILE "${_file}" COMMAND_ERROR_IS_FATAL ANY)
endforeach()
