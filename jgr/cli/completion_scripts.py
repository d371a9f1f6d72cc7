# SPDX-License-Identifier: Apache-2.0
"""The scripts that `jgr completion` prints. They do as little as possible: the candidates come from `jgr` itself."""

from __future__ import annotations

BASH = r"""# Completes jgr in bash. In ~/.bashrc: source <(jgr completion bash)
_jgr() {
    local -a words=()
    local token before= word line prefix= program
    local i
    # Readline takes = and : for ends of words (COMP_WORDBREAKS); here --set server.port=80 is two words.
    for ((i = 0; i <= COMP_CWORD; i++)); do
        token=${COMP_WORDS[i]}
        if [[ i -gt 1 && -n $token && ($token =~ ^[=:]+$ || $before =~ ^[=:]+$) ]]; then
            words[${#words[@]} - 1]+=$token
        else
            words+=("$token")
        fi
        before=$token
    done
    local last=$((${#words[@]} - 1))
    local typed=${words[last]}
    local current=${typed//[\"\'\\]/}
    words[last]=$current
    program=${words[0]/#\~\//$HOME/}
    # What stands before the last = or : is a word of its own for readline, which is not replaced.
    local breaks=${COMP_WORDBREAKS//[^=:]/}
    [[ -n $breaks ]] && prefix=${current%"${current##*[$breaks]}"}
    COMPREPLY=()
    while IFS= read -r line; do
        word=${line%%$'\t'*}
        [[ -n $word ]] || continue
        word=${word#"$prefix"}
        # Names with blanks and the like, unless the user has begun with a quote.
        if [[ $typed != *[\"\']* && $word == *[[:space:]\&\;\(\)\<\>\|\'\"\\\$\`\*\?\[\!\#]* ]]; then
            printf -v word %q "$word"
        fi
        COMPREPLY+=("$word")
    done < <("$program" completion reply -- "${words[@]:1}" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=/.] ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -F _jgr jgr
"""

ZSH = r"""#compdef jgr
# Completes jgr in zsh. In ~/.zshrc, after compinit: source <(jgr completion zsh)
_jgr() {
    local -a open open_texts closed closed_texts
    local line word text
    local -a given=("${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}")
    local -a lines=("${(@f)$("${(Q)words[1]}" completion reply -- "${given[@]}" 2>/dev/null)}")
    for line in "${lines[@]}"; do
        word=${line%%$'\t'*}
        text=${line#*$'\t'}
        [[ -n $word ]] || continue
        [[ -n $text ]] && text="$word  -- $text" || text=$word
        if [[ $word == *[=/.] ]]; then
            open+=("$word")
            open_texts+=("$text")
        else
            closed+=("$word")
            closed_texts+=("$text")
        fi
    done
    (( $#open )) && compadd -l -S '' -d open_texts -a open
    (( $#closed )) && compadd -l -d closed_texts -a closed
}
if [[ $funcstack[1] == _jgr ]]; then
    _jgr "$@"
else
    compdef _jgr jgr
fi
"""

FISH = r"""# Completes jgr in fish. In ~/.config/fish/config.fish: jgr completion fish | source
function __jgr_candidates
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l program $words[1]
    set -e words[1]
    $program completion reply -- $words "$current" 2>/dev/null
end
complete -c jgr -f -a '(__jgr_candidates)'
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
